"""Decides which streams of codec frames are decoded next, and together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from omnistage.ar.generation.frames import FrameBuffer
from omnistage.ar.generation.options import GenerationOptions
from omnistage.contracts.errors import (
    InternalError,
    OmniError,
    OutOfMemoryError,
    OverloadedError,
    RequestCancelledError,
    StageLostError,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest

DECODE = "decode"


@dataclass(slots=True, frozen=True, kw_only=True)
class Piece:
    """`frames` of a stream from frame `start` on. A `final` one may be empty."""

    start: int
    frames: int
    final: bool
    epoch: int


@dataclass(slots=True, eq=False, kw_only=True)
class _Stream:
    """`decoded` counts frames. `due_s`: when the audio made so far has been played, or, before
    there is any, when the request came. `late` are the pieces whose audio is still being built."""

    identity: RequestIdentity
    start: StageData
    due_s: float
    credits: int
    complete: bool
    buffer: FrameBuffer = field(default_factory=FrameBuffer)
    epoch: int = 0
    decoded: int = 0
    num_samples: int = 0
    open: bool = False
    alone: bool = False
    late: deque[Piece] = field(default_factory=deque)

    @property
    def order(self) -> tuple[int, float]:
        return (-self.identity.priority, self.due_s)


class GenerationScheduler:
    """Pieces of equal shape share a batch; whose listener would run out of audio first goes first,
    among equal priorities. Whoever is first is always in the batch, so nobody starves.

    A batch that fails is tried again stream by stream: its state is as before. After a shortage of
    memory batches stay half as large until the stage has been empty.
    """

    def __init__(
        self, options: GenerationOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._streams: dict[RequestKey, _Stream] = {}
        self._credits: dict[RequestKey, int] = {}
        self._most = options.max_num_seqs

    def add(self, request: StageRequest) -> None:
        """Raises `OverloadedError` when the stage is full and `InvalidRequestError` for data
        without codes."""
        key = request.identity.key
        if key in self._streams:
            raise InternalError(f"request {request.identity} is already at this stage")
        if len(self._streams) >= self._options.max_queued_requests:
            raise OverloadedError(
                f"{self._options.max_queued_requests} requests are at this stage already; retry "
                "later, or raise options.max_queued_requests",
                retry_after_s=1.0,
            )
        stream = _Stream(
            identity=request.identity,
            start=request.data,
            due_s=self._clock(),
            credits=self._credits.pop(key, 0),
            complete=request.input_complete,
        )
        stream.buffer.append(request.data)
        self._streams[key] = stream

    def append_input(self, identity: RequestIdentity, data: StageData, epoch: int) -> None:
        """Input of a later epoch begins a new waveform; what is not out of the old is dropped."""
        stream = self._streams.get(identity.key)
        if stream is None or stream.complete or epoch < stream.epoch:
            return
        if epoch > stream.epoch:
            stream.epoch, stream.decoded, stream.buffer = epoch, 0, FrameBuffer()
            stream.due_s, stream.start = self._clock(), data
        stream.buffer.append(data)

    def end_input(self, identity: RequestIdentity, epoch: int) -> None:
        stream = self._streams.get(identity.key)
        if stream is not None and epoch >= stream.epoch:
            stream.complete = True

    def set_credits(self, key: RequestKey, credits: int) -> None:
        if stream := self._streams.get(key):
            stream.credits = credits
        else:
            self._credits[key] = credits

    def abort(self, key: RequestKey) -> None:
        self._forget(key)

    def next_command(self) -> Command | None:
        ready = list(self._ready())
        if not ready:
            return None
        batch = self._batch(ready)
        longest = max(piece.frames for _, piece in batch)
        for stream, _ in batch:
            stream.open = True
        codes = [stream.buffer.first(piece.frames, longest) for stream, piece in batch]
        return Command(
            name=DECODE,
            kind="decode",
            identities=tuple(stream.identity for stream, _ in batch),
            data=StageData(
                modality=Modality.TOKENS,
                fields={
                    "pieces": [piece for _, piece in batch],
                    "starts": [one.start if piece.start == 0 else None for one, piece in batch],
                },
                tensors={"codes": np.stack(codes)},
            ),
        )

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        """The audio itself comes by `deliver`."""
        frame_s, errors = results[0].fields["frame_s"], results[0].fields["errors"]
        now_s = self._clock()
        for identity, piece in zip(command.identities, command.data.fields["pieces"], strict=True):
            stream = self._streams.get(identity.key)
            if stream is None:
                continue
            if identity.key in errors:
                yield self._ended(identity, errors[identity.key])
                continue
            stream.due_s = max(stream.due_s, now_s) + piece.frames * frame_s
            stream.alone = False
            stream.buffer.drop(piece.frames)
            stream.decoded += piece.frames
            stream.late.append(piece)

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        held = [one for one in command.identities if one.key in self._streams]
        retried = not isinstance(error, StageLostError | RequestCancelledError)
        if len(command.identities) > 1 and retried:
            for identity in held:
                self._streams[identity.key].alone = True
            if isinstance(error, OutOfMemoryError):
                self._most = max(1, len(command.identities) // 2)
            return ()
        return [self._ended(identity, error) for identity in held]

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        stream = self._streams.get(identity.key)
        if stream is None:
            return ()
        if isinstance(outcome, OmniError):
            return [self._ended(identity, outcome)]
        piece = stream.late.popleft()
        silent = not len(outcome.tensors["audio"])
        if piece.epoch != stream.epoch or (silent and not piece.final):
            return ()
        outcome.fields["num_samples_before"] = stream.num_samples
        stream.num_samples += len(outcome.tensors["audio"])
        if piece.final:
            self._forget(identity.key)
        return [
            Emission(
                identity=identity,
                data=outcome,
                final=piece.final,
                finish_reason="stop" if piece.final else None,
            )
        ]

    def next_wake_s(self) -> float | None:
        return None

    def counts(self) -> tuple[int, int]:
        running = sum(stream.open for stream in self._streams.values())
        return (running, len(self._streams) - running)

    def _ready(self) -> Iterator[tuple[_Stream, Piece]]:
        """Most urgent first."""
        free = self._options.max_streams - self.counts()[0]
        waiting = sorted(self._streams.values(), key=lambda stream: stream.order)
        for stream in waiting:
            if stream.credits <= len(stream.late) or not (stream.open or free > 0):
                continue
            if piece := self._next_piece(stream):
                free -= not stream.open
                yield stream, piece

    def _next_piece(self, stream: _Stream) -> Piece | None:
        options, have = self._options, len(stream.buffer)
        if any(piece.final for piece in stream.late):
            return None
        if not options.async_chunk:
            size = options.full_pass_frames
        elif stream.decoded == 0:
            size = options.initial_codec_chunk_frames
        else:
            size = options.codec_chunk_frames
        final = stream.complete and have <= size
        if not final and (have < size or not (options.async_chunk or stream.complete)):
            return None
        frames = have if final else size
        return Piece(start=stream.decoded, frames=frames, final=final, epoch=stream.epoch)

    def _batch(self, ready: list[tuple[_Stream, Piece]]) -> list[tuple[_Stream, Piece]]:
        first = ready[0]
        if first[0].alone:
            return [first]
        shape = self._shape(*first)
        alike = [pair for pair in ready if not pair[0].alone and self._shape(*pair) == shape]
        fitting = max(1, self._options.max_batch_frames // max(1, shape[0]))
        return alike[: min(self._most, fitting)]

    def _shape(self, stream: _Stream, piece: Piece) -> tuple[int, int | None]:
        if piece.frames == 0:
            return (0, stream.buffer.num_codebooks)
        sizes = self._options.piece_sizes
        return (min(size for size in sizes if size >= piece.frames), stream.buffer.num_codebooks)

    def _ended(self, identity: RequestIdentity, error: OmniError) -> Emission:
        self._forget(identity.key)
        return Emission(identity=identity, error=error, final=True)

    def _forget(self, key: RequestKey) -> None:
        self._streams.pop(key, None)
        self._credits.pop(key, None)
        if not self._streams:
            self._most = self._options.max_num_seqs
