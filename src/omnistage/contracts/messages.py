"""Messages between the engine and its replicas, and between a leader and its ranks.

Each is a tagged `msgspec.Struct`; unknown tags, unknown fields and wrong types are errors.
`PROTOCOL_VERSION` leads every frame, and a peer of another version is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from omnistage.contracts.errors import ErrorRecord
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.payloads import PayloadRef
from omnistage.contracts.sampling import SamplingParams

PROTOCOL_VERSION = 1


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True
):
    """Base of all messages. `stage_id` and `replica_id` address one replica of one process."""

    stage_id: int = -1
    replica_id: int = -1


# engine → replica --------------------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """A request's first payload at this stage. More follow while `input_complete` is false."""

    identity: RequestIdentity
    source_stage_id: int | None
    sequence: int
    payload: PayloadRef
    params: SamplingParams
    input_complete: bool
    credits: int
    """How many partial outputs may be outstanding before the stage pauses this request."""


class AppendInput(Message, frozen=True, kw_only=True, tag="append_input"):
    """The next payload of a streamed input, the last one when `input_complete`. `epoch` grows when
    earlier input is superseded."""

    identity: RequestIdentity
    source_stage_id: int | None
    sequence: int
    payload: PayloadRef
    input_complete: bool = False
    epoch: int = 0


class EndInput(Message, frozen=True, kw_only=True, tag="end_input"):
    identity: RequestIdentity
    epoch: int = 0


class Acknowledge(Message, frozen=True, kw_only=True, tag="acknowledge"):
    """Output number `sequence` of this request was consumed: free it, one credit is back."""

    identity: RequestIdentity
    sequence: int


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Stop this child and free what it holds. Answered by `Aborted`, also when it is unknown."""

    identity: RequestIdentity
    reason: str


class Control(Message, frozen=True, kw_only=True, tag="control"):
    """A call to the replica itself (profiling, cache reset …), answered by `ControlResult`."""

    call_id: str
    method: str
    arguments: dict[str, Any] = {}


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """Finish what is admitted, take nothing new, then answer `Stopped`."""


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """Cancel everything, release everything, answer `Stopped` and end."""


# replica → engine --------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a process: proves that it is ours."""

    token: str
    pid: int
    protocol_version: int = PROTOCOL_VERSION


class LoadProgress(Message, frozen=True, kw_only=True, tag="load_progress"):
    """What the replica is loading now, for people who wait."""

    note: str
    fraction: float | None = None


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """Loaded and able to serve. `description` is what the runtime says of itself."""

    description: dict[str, Any] = {}
    load_s: float = 0.0
    rank_pids: tuple[int, ...] = ()


class StartFailed(Message, frozen=True, kw_only=True, tag="start_failed"):
    error: ErrorRecord


class Operation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the executing thread of a replica is doing: `kind`, since when, by when it must end."""

    kind: str
    elapsed_s: float
    limit_s: float


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stage_id: int
    replica_id: int
    running: int
    waiting: int
    operation: Operation | None = None
    peak_memory_mb: float | None = None
    stats: dict[str, float] = {}
    """What the scheduler counts beside (`stats` of a token scheduler)."""


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent by the process's own thread; what it carries comes from the executing threads."""

    statuses: tuple[ReplicaStatus, ...]


class Output(Message, frozen=True, kw_only=True, tag="output"):
    """Output number `sequence` (from 0, without gaps) of one child at one stage.

    `final` marks its last. `timings_s` maps a phase's name to seconds, on the final one. `tx_s` is
    what handing the payload to the connector took.
    """

    identity: RequestIdentity
    sequence: int
    output_index: int = 0
    payload: PayloadRef
    final: bool
    finish_reason: str | None = None
    timings_s: dict[str, float] = {}
    tx_s: float = 0.0


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    identity: RequestIdentity
    step: int
    total_steps: int


class InputConsumed(Message, frozen=True, kw_only=True, tag="input_consumed"):
    """The payload with this `sequence` of `source_stage_id` has been copied in."""

    identity: RequestIdentity
    source_stage_id: int | None
    sequence: int
    rx_s: float = 0.0
    nbytes: int = 0


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """This child failed at this stage; its memory there is free. Others go on."""

    identity: RequestIdentity
    error: ErrorRecord


class Aborted(Message, frozen=True, kw_only=True, tag="aborted"):
    """Answer to `Abort`: nothing of this child is left at this stage."""

    identity: RequestIdentity


class ControlResult(Message, frozen=True, kw_only=True, tag="control_result"):
    call_id: str
    result: Any = None
    error: ErrorRecord | None = None


class ReplicaFailed(Message, frozen=True, kw_only=True, tag="replica_failed"):
    """The replica is no longer usable (a rank died, its executing thread broke)."""

    error: ErrorRecord


class Stopped(Message, frozen=True, kw_only=True, tag="stopped"):
    """Nothing runs in this replica any more."""


# leader ↔ rank -----------------------------------------------------------------------------------


class RankHello(Message, frozen=True, kw_only=True, tag="rank_hello"):
    rank: int
    token: str
    pid: int
    protocol_version: int = PROTOCOL_VERSION


class RankLoad(Message, frozen=True, kw_only=True, tag="rank_load"):
    """Build the executor. `config` is the resolved stage configuration as plain values;
    `rendezvous` the address where the ranks meet, when they talk to each other."""

    config: dict[str, Any]
    rendezvous: str | None = None


class RankCommand(Message, frozen=True, kw_only=True, tag="rank_command"):
    """Commands are numbered without gaps: every rank executes the same ones in the same order."""

    sequence: int
    name: str
    identities: tuple[RequestIdentity, ...]
    payload: PayloadRef
    lockstep: bool = True


class RankVerdict(Message, frozen=True, kw_only=True, tag="rank_verdict"):
    """The leader's decision at one checkpoint inside a command: who is cancelled, for all ranks."""

    sequence: int
    checkpoint: int
    cancelled: tuple[RequestIdentity, ...] = ()


class RankResult(Message, frozen=True, kw_only=True, tag="rank_result"):
    """`error` set: the command failed on this rank and left no state behind."""

    rank: int
    sequence: int
    payload: PayloadRef | None = None
    error: ErrorRecord | None = None


class RankProgress(Message, frozen=True, kw_only=True, tag="rank_progress"):
    """How far the command that this rank carries out is with one child, before its result."""

    identity: RequestIdentity
    step: int
    total_steps: int


class RankRelease(Message, frozen=True, kw_only=True, tag="rank_release"):
    """Forget this child's state."""

    identity: RequestIdentity


class RankStop(Message, frozen=True, kw_only=True, tag="rank_stop"):
    pass


ToReplica = Submit | AppendInput | EndInput | Acknowledge | Abort | Control | Drain | Shutdown
FromReplica = (
    Hello
    | LoadProgress
    | Ready
    | StartFailed
    | Heartbeat
    | Output
    | Progress
    | InputConsumed
    | Failed
    | Aborted
    | ControlResult
    | ReplicaFailed
    | Stopped
)
ToRank = RankLoad | RankCommand | RankVerdict | RankRelease | RankStop
FromRank = RankHello | RankProgress | RankResult
