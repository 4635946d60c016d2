"""A stage runtime small enough to see through: vectors in, scaled vectors out, one piece a step.

A request's fields: `count` pieces of `size` floats from value `start` on; the second stage reads
the pieces as they come. Every rank computes its share of a vector. `fault` makes the executor
misbehave at piece `at`, on `rank`, in `stage`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import InternalError, InvalidRequestError, OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import (
    Command,
    Emission,
    ExecutionContext,
    LoadReporter,
    StageRequest,
)
from omnistage.contracts.sampling import SamplingParams
from omnistage.contracts.tensors import HostTensor


def as_array(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, HostTensor) else value


@dataclass
class Piece:
    """One step's work. Its tensors are made when it runs: a request may count very far."""

    fields: dict[str, Any]
    make: Callable[[], dict[str, Any]]


_PASSED_ON = ("fault", "delay_s", "late", "lane")


def split_pieces(data: StageData) -> Iterator[Piece]:
    """`count` pieces for a prompt; a piece from upstream stays one."""
    if "count" not in data.fields:
        yield Piece(data.fields, lambda: data.tensors)
        return
    fields = {key: data.fields[key] for key in _PASSED_ON if key in data.fields}
    start, size = data.fields.get("start", 0), data.fields.get("size", 4)
    for index in range(data.fields["count"]):
        value = start + index
        yield Piece(
            {**fields, "index": index}, lambda v=value: {"x": np.full(size, v, dtype=np.float32)}
        )


@dataclass
class _Child:
    identity: RequestIdentity
    pieces: deque[Piece] = field(default_factory=deque)
    input_complete: bool = False
    credits: int = 0
    alone: bool = False
    """Its last batch failed: it is tried again by itself."""

    def is_runnable(self) -> bool:
        return self.credits > 0 and bool(self.pieces or self.input_complete)


class ToyScheduler:
    def __init__(self, stage: ResolvedStage) -> None:
        self._max_num_seqs = stage.max_num_seqs
        self._children: dict[RequestKey, _Child] = {}
        self._credits: dict[RequestKey, int] = {}

    def add(self, request: StageRequest) -> None:
        child = _Child(request.identity, input_complete=request.input_complete)
        child.credits = self._credits.pop(request.identity.key)
        child.pieces.extend(split_pieces(request.data))
        self._children[request.identity.key] = child

    def append_input(self, identity: RequestIdentity, data: StageData, epoch: int) -> None:
        self._children[identity.key].pieces.extend(split_pieces(data))

    def end_input(self, identity: RequestIdentity, epoch: int) -> None:
        self._children[identity.key].input_complete = True

    def set_credits(self, key: RequestKey, credits: int) -> None:
        if key in self._children:
            self._children[key].credits = credits
        else:
            self._credits[key] = credits

    def abort(self, key: RequestKey) -> None:
        self._children.pop(key, None)
        self._credits.pop(key, None)

    def next_command(self) -> Command | None:
        runnable = [child for child in self._children.values() if child.is_runnable()]
        if not runnable:
            return None
        together = [child for child in runnable if not child.alone][: self._max_num_seqs]
        batch = together or runnable[:1]
        for child in batch:  # Round robin: whoever ran goes to the back.
            self._children[child.identity.key] = self._children.pop(child.identity.key)
        pieces = [child.pieces[0] if child.pieces else None for child in batch]
        tensors = {
            f"{i}.{name}": value
            for i, piece in enumerate(pieces)
            if piece is not None
            for name, value in piece.make().items()
        }
        fields = {"pieces": [piece.fields if piece is not None else None for piece in pieces]}
        return Command(
            name="scale",
            kind="step",
            identities=tuple(child.identity for child in batch),
            data=StageData(modality=Modality.HIDDEN, fields=fields, tensors=tensors),
        )

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        for i, identity in enumerate(command.identities):
            child = self._children[identity.key]
            child.alone = False
            piece = child.pieces.popleft() if child.pieces else None
            final = child.input_complete and not child.pieces
            if final:
                del self._children[identity.key]
            data = StageData(modality=Modality.AUDIO, fields={"empty": piece is None})
            if piece is not None:
                names = [n.split(".", 1)[1] for n in results[0].tensors if n.startswith(f"{i}.")]
                data.fields = piece.fields
                data.tensors = {
                    name: np.concatenate([as_array(r.tensors[f"{i}.{name}"]) for r in results])
                    for name in names
                }
            yield Emission(identity=identity, data=data, final=final)

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        """A failed batch is tried again one by one, so that only the culprit fails."""
        for identity in command.identities:
            if len(command.identities) > 1:
                self._children[identity.key].alone = True
            else:
                del self._children[identity.key]
                yield Emission(identity=identity, error=error)

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        raise InternalError("the toy finishes nothing later")

    def next_wake_s(self) -> float | None:
        return None

    def counts(self) -> tuple[int, int]:
        return (0, len(self._children))


class ToyExecutor:
    def __init__(self, stage: ResolvedStage, rank: int, world_size: int) -> None:
        self._stage_id = stage.stage_id
        self._rank = rank
        self._world_size = world_size
        self._factor = stage.options.get("factor", 1.0)
        self._load_error = stage.options.get("load_error")
        self.held: dict[RequestKey, int] = {}

    def load(self, report: LoadReporter) -> dict[str, Any]:
        report("building nothing", 1.0)
        if self._load_error:
            raise InvalidRequestError(self._load_error)
        return {"factor": self._factor, "rank": self._rank}

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        cancelled = context.checkpoint()
        result = StageData(modality=Modality.HIDDEN)
        for i, (identity, piece) in enumerate(
            zip(command.identities, command.data.fields["pieces"], strict=True)
        ):
            self.held[identity.key] = self.held.get(identity.key, 0) + 1
            if piece is None:
                continue
            if identity.key not in cancelled:
                self._misbehave(piece)
            if context.rank == 0:
                context.progress(identity, piece["index"] + 1, piece["index"] + 1)
            prefix = f"{i}."
            for name, value in command.data.tensors.items():
                if name.startswith(prefix):
                    share = np.array_split(as_array(value), self._world_size)[self._rank]
                    result.tensors[name] = share * np.float32(self._factor)
        context.checkpoint()
        return result

    def _misbehave(self, piece: dict[str, Any]) -> None:
        time.sleep(piece.get("delay_s", 0.0))
        fault = piece.get("fault")
        if not fault or piece["index"] != fault["at"] or self._stage_id != fault["stage"]:
            return
        if self._rank != fault.get("rank", 0):
            return
        match fault["kind"]:
            case "invalid":
                raise InvalidRequestError("the toy refuses this piece")
            case "crash":
                raise RuntimeError("secret internals")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)

    def release(self, key: RequestKey) -> None:
        self.held.pop(key, None)

    def control(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "executor_holds":
            return len(self.held)
        raise InvalidRequestError(f"the toy has no method {method!r}")

    def close(self) -> None:
        self.held.clear()


class ToyRuntime:
    scheduler = ToyScheduler
    executor = ToyExecutor


def plus_one(data: StageData, params: SamplingParams, executor: ToyExecutor) -> StageData:
    """An input adapter: adds 1 to every piece."""
    tensors = {name: as_array(value) + np.float32(1.0) for name, value in data.tensors.items()}
    return StageData(modality=data.modality, fields=data.fields, tensors=tensors)


def companions(
    inputs: StageData, params: tuple[SamplingParams, ...]
) -> list[tuple[str, StageData]]:
    """A guidance companion that counts from 100 on."""
    fields = {**inputs.fields, "start": inputs.fields.get("start", 0) + 100}
    return [("negative", StageData(modality=inputs.modality, fields=fields))]
