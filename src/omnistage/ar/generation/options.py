"""What a deployment may set on a generation stage, read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.ar.stage_options import check_options
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage

CPU_BATCH_FRAMES = 32
"""The released Qwen3-Omni decoder on one core, 1, 2 and 4 streams together: seconds a second of
sound 1.28, 1.08 and 0.92 in pieces of 4 frames, 0.78, 0.86 and 1.05 in pieces of 25."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """A generation stage: some of its keys (see `ResolvedStage`) and its `options`.

    Of `options`: `codec_model` names the `CodecModelFactory` ("package.module:Name"). A stream's
    first piece is `initial_codec_chunk_frames` long, further ones `codec_chunk_frames`; without
    `async_chunk` pieces begin when all input is there and are `full_pass_frames` long at most.
    `max_streams` have state at a time, `max_queued_requests` may be here. `max_num_seqs` share a
    batch, or as many as have `max_batch_frames` together. `model` is the model's own, a mapping
    that only its factory reads.
    """

    codec_model: str
    initial_codec_chunk_frames: int = 4
    codec_chunk_frames: int = 25
    full_pass_frames: int = 300
    max_streams: int = 64
    max_queued_requests: int = 4096
    max_batch_frames: int = 4096
    model: dict[str, Any] = field(default_factory=dict)
    max_num_seqs: int = 8
    async_chunk: bool = True

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        """Frames of the shapes that pieces are decoded at, ascending: an end that is shorter takes
        the next larger one. Few, so that they can be captured."""
        sizes = {self.initial_codec_chunk_frames, self.codec_chunk_frames}
        if not self.async_chunk:
            size = self.codec_chunk_frames
            while size < self.full_pass_frames:
                sizes.add(size)
                size *= 2
            sizes.add(self.full_pass_frames)
        return tuple(sorted(sizes))


_OPTION_TYPES: dict[str, tuple[type, str]] = {
    "codec_model": (str, 'an import string "package.module:Name"'),
    "initial_codec_chunk_frames": (int, "a positive integer"),
    "codec_chunk_frames": (int, "a positive integer"),
    "full_pass_frames": (int, "a positive integer"),
    "max_streams": (int, "a positive integer"),
    "max_queued_requests": (int, "a positive integer"),
    "max_batch_frames": (int, "a positive integer"),
    "model": (dict, "a mapping"),
}


def read_generation_options(stage: ResolvedStage) -> GenerationOptions:
    """Raises `ConfigurationError` for an unknown option (naming the nearest), a wrong value or none
    where one is needed, and `UnsupportedCombinationError` for values that exclude each other."""
    check_options(stage, _OPTION_TYPES, kind="generation")
    if "codec_model" not in stage.options:
        raise ConfigurationError(
            f"stage {stage.stage_id} ({stage.name}): option codec_model is missing; it names "
            "the decoder of the stage and is set by the model's folder"
        )
    by_device = {"max_batch_frames": CPU_BATCH_FRAMES} if stage.devices[0] == "cpu" else {}
    options = GenerationOptions(
        **{**by_device, **stage.options},
        max_num_seqs=stage.max_num_seqs,
        async_chunk=stage.async_chunk,
    )
    _check_order(stage, options, "initial_codec_chunk_frames", "codec_chunk_frames")
    _check_order(stage, options, "codec_chunk_frames", "full_pass_frames")
    _check_order(stage, options, "max_num_seqs", "max_streams")
    return options


def _check_order(stage: ResolvedStage, options: GenerationOptions, less: str, more: str) -> None:
    low, high = getattr(options, less), getattr(options, more)
    if low > high:
        raise UnsupportedCombinationError(
            f"stage {stage.stage_id}: {less} is {low}, more than {more} {high}; raise the one or "
            "lower the other",
            param=less,
        )
