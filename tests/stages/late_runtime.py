"""The toy with late outputs: a piece's field `late` says how its output thread behaves.

"now", "retried" (its command fails unless it is alone), "gated" (waits at the gate), "crash",
"memory", "lost" or "hang"; its field `lane` says where. What is delivered is
the leader's own share of the vector.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import OmniError, OutOfMemoryError, StageLostError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import OUTPUT_LANE, Command, Emission, ExecutionContext
from tests.stages.odd_runtime import OddExecutor, OddScheduler, wait_at_gate

noted: list[str] = []
"""What happened in this process, in its order."""
threads: set[str] = set()
"""Where outputs were finished."""


class LateScheduler(OddScheduler):
    def __init__(self, stage: ResolvedStage) -> None:
        super().__init__(stage)
        self._late: dict[RequestKey, deque[bool]] = {}
        """Of each child, whether the outputs on their way are final."""

    def set_credits(self, key: RequestKey, credits: int) -> None:
        super().set_credits(key, credits - len(self._late.get(key, ())))

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        for emission in super().complete(command, results):
            assert emission.data is not None
            if emission.data.fields.get("late"):
                self._late.setdefault(emission.identity.key, deque()).append(emission.final)
            else:
                yield emission

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        final = self._late[identity.key].popleft()
        if isinstance(outcome, OmniError):
            self.abort(identity.key)
            return (Emission(identity=identity, error=outcome),)
        if final:
            del self._late[identity.key]
        return (Emission(identity=identity, data=outcome, final=final),)

    def abort(self, key: RequestKey) -> None:
        super().abort(key)
        self._late.pop(key, None)

    def next_wake_s(self) -> float | None:
        return None

    def counts(self) -> tuple[int, int]:
        return (len(self._late), super().counts()[1])


class LateExecutor(OddExecutor):
    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        result = super().execute(command, context)
        pieces = command.data.fields["pieces"]
        for i, (identity, piece) in enumerate(zip(command.identities, pieces, strict=True)):
            if piece is None or not piece.get("late"):
                continue
            names = [name for name in result.tensors if name.startswith(f"{i}.")]
            tensors = {name.split(".", 1)[1]: result.tensors[name] for name in names}
            lane = piece.get("lane", OUTPUT_LANE)
            context.finish_later(identity, partial(finish, piece, tensors), lane)
        if len(pieces) > 1 and any(piece.get("late") == "retried" for piece in pieces if piece):
            raise OutOfMemoryError(f"{len(pieces)} are too much at once")
        return result

    def close(self) -> None:
        super().close()
        noted.append("closed")


def finish(piece: dict[str, Any], tensors: dict[str, Any]) -> StageData:
    threads.add(threading.current_thread().name)
    match piece["late"]:
        case "gated":
            wait_at_gate()
        case "crash":
            raise RuntimeError("secret internals")
        case "memory":
            raise MemoryError
        case "lost":
            raise StageLostError("the device is gone")
        case "hang":
            time.sleep(3600)
    noted.append("finished")
    return StageData(modality=Modality.AUDIO, fields=piece, tensors=tensors)


class LateRuntime:
    scheduler = LateScheduler
    executor = LateExecutor
