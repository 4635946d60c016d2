"""What a generation stage needs of a model: codec frames in, pieces of one waveform out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omnistage.contracts.payloads import StageData

if TYPE_CHECKING:
    import torch

    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.identity import RequestKey
    from omnistage.contracts.runtime import LoadReporter


@dataclass(slots=True, kw_only=True, eq=False)
class CodecStream:
    """One waveform under way: its `row` of device state and the `frames` decoded so far."""

    key: RequestKey
    row: int
    frames: int = 0


class CodecModel(Protocol):
    """A codec decoder that carries state: pieces, one after another, are the one-pass decode.

    All methods run in the executing thread. Codes are (…, num_codebooks) integers from 0 to
    `codebook_size` - 1. `max_streams` is how many streams it has state for. Pieces are padded to
    `captured_sizes`, ascending, where there are any: those run much faster.
    """

    sample_rate: int
    samples_per_frame: int
    num_codebooks: int
    codebook_size: int
    max_streams: int
    captured_sizes: tuple[int, ...]

    def begin(self, key: RequestKey) -> CodecStream: ...

    def decode(
        self, streams: Sequence[CodecStream], codes: torch.Tensor, frames: Sequence[int]
    ) -> list[torch.Tensor]:
        """codes (B, k, num_codebooks) int64 → B float32 waveforms (n,) on the device.

        `frames[i]` of stream i's k frames are real. Only the last piece of a stream may be padded.
        An error leaves every stream as it was. Without host synchronisation; the waveforms may be
        overwritten by the next call, in order on the device. They may be empty.
        """

    def finish(self, stream: CodecStream) -> torch.Tensor:
        """What is still to come (n,) float32 once the last frame has been decoded."""

    def release(self, stream: CodecStream) -> None:
        """The stream's state is free again; nothing is kept of it."""

    def describe(self) -> dict[str, Any]:
        """Plain values for logs."""

    def close(self) -> None: ...


@runtime_checkable
class BeginsWithInput(Protocol):
    """A `CodecModel` whose streams depend on more than codes: a voice, a seed."""

    def begin_with(self, key: RequestKey, start: StageData) -> CodecStream:
        """In the place of `begin`. `start` is the request's first input, as it was adapted."""


@runtime_checkable
class TakesLong(Protocol):
    """A `CodecModel` whose calls may take seconds: it calls `between` now and then, which is set
    before each call, and lets what that raises pass."""

    between: Callable[[], None]


class CodecModelFactory(Protocol):
    """What `options["codec_model"]` names by import string: builds the model of a stage, with state
    for `max_streams` streams."""

    def __call__(
        self, stage: ResolvedStage, device: str, max_streams: int, report: LoadReporter
    ) -> CodecModel: ...
