"""Qwen3-Omni's codec decoder in pieces that are, put together, its one-pass decode.

transformers' `Qwen3OmniMoeCode2Wav` runs unmodified. Hooks on its leaves carry what a piece needs
of those before: keys and values of the attention window, the left context of causal convolutions,
one column of each overlapping transposed convolution. The last kind makes output late: a first
piece is `lag` samples short, and as in one pass no tail follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.ar.generation.captured import CapturedSteps
from omnistage.ar.generation.causal_convs import CausalConvs, Place, StreamStep
from omnistage.ar.generation.codec import CodecStream
from omnistage.ar.generation.options import read_generation_options
from omnistage.ar.generation.state_pool import StatePool
from omnistage.contracts.identity import RequestKey
from omnistage.memory.transformers_loader import load_planned, plan_transformers
from omnistage.models.qwen3_omni.code2wav_attention import WindowedAttention
from omnistage.models.qwen3_omni.code2wav_gate import (
    check_against_one_pass,
    check_modules,
    is_kind,
)
from omnistage.platforms.registry import platform_of

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3OmniMoeCode2Wav

    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.runtime import LoadReporter
    from omnistage.memory.plan import LoadPlan
    from omnistage.platforms.base import Platform

SAMPLE_RATE = 24_000
"""Hz; no configuration of the checkpoint says it."""


class StreamedCode2Wav:
    """A `CodecModel`. `module` keeps its own `forward`, which still decodes in one pass.

    State of one stream of the released model: 8 layers x 2 x 71 x 1024 keys and values and 133,440
    numbers of convolution context, 5.2 MB in float32, whatever its length.
    """

    sample_rate = SAMPLE_RATE

    def __init__(self, module: Qwen3OmniMoeCode2Wav, *, device: str, max_streams: int) -> None:
        """Raises `UnsupportedCombinationError` for a module that is not what this file knows."""
        check_modules(module)
        config = module.config
        self.module = module
        self.num_codebooks = config.num_quantizers
        self.codebook_size = config.codebook_size
        self.max_streams = max_streams
        self.samples_per_frame = int(module.total_upsample)
        self._device = device
        self._pool = StatePool(max_streams, device)
        self._convs = CausalConvs()
        self.lag = self._follow_convolutions()
        self.attention = WindowedAttention(module, self._pool, self._convs)
        self._captured: CapturedSteps | None = None

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        return self._captured.sizes if self._captured is not None else ()

    @property
    def bytes_per_stream(self) -> int:
        return self._pool.bytes_per_stream

    @property
    def num_streams(self) -> int:
        return self._pool.num_taken

    def begin(self, key: RequestKey) -> CodecStream:
        return CodecStream(key=key, row=self._pool.take_row())

    def release(self, stream: CodecStream) -> None:
        self._pool.free_row(stream.row)

    def decode(
        self, streams: Sequence[CodecStream], codes: torch.Tensor, frames: Sequence[int]
    ) -> list[torch.Tensor]:
        import torch

        rows = torch.tensor([stream.row for stream in streams]).to(self._device, non_blocking=True)
        before = torch.tensor([stream.frames for stream in streams])
        run = self._captured or self.step
        waves = run(rows, before.to(self._device, non_blocking=True), codes)
        pieces = []
        for stream, wave, count in zip(streams, waves, frames, strict=True):
            first = max(0, self.lag - stream.frames * self.samples_per_frame)
            pieces.append(wave[first : count * self.samples_per_frame])
            stream.frames += count
        return pieces

    def step(self, rows: torch.Tensor, before: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """rows (B,), before (B,) frames decoded, codes (B, k, num_codebooks), all int64 on the
        device → float32 (B, k x samples_per_frame), `lag` samples late. Capturable at fixed shapes.
        """
        import torch

        step = StreamStep(before=before, read=self._pool.read(rows))
        with self._convs.during(step), torch.no_grad():
            waves = self.module(codes.transpose(1, 2))
            self._pool.write(rows, step.written)
        return waves[:, 0].float()

    def capture(
        self, platform: Platform, *, max_batch: int, sizes: Sequence[int], report: LoadReporter
    ) -> None:
        """From now on pieces of these sizes are replayed from graphs."""
        captured = CapturedSteps(
            self.step,
            platform,
            self._device,
            max_batch=max_batch,
            sizes=sizes,
            num_codebooks=self.num_codebooks,
            spare_row=self._pool.spare_row,
        )
        captured.capture(report)
        self._captured = captured

    def finish(self, stream: CodecStream) -> torch.Tensor:
        import torch

        return torch.empty(0, device=self._device)

    def describe(self) -> dict[str, Any]:
        return {
            "codec": type(self.module).__name__,
            "sample_rate": self.sample_rate,
            "samples_per_frame": self.samples_per_frame,
            "lag_samples": self.lag,
            "state_bytes_per_stream": self.bytes_per_stream,
            "max_streams": self.max_streams,
            "captured_sizes": list(self.captured_sizes),
        }

    def close(self) -> None:
        if self._captured is not None:
            self._captured.clear()
        self._captured = None
        self._convs.close()
        self.attention.close()
        self._pool.tensors.clear()

    def _follow_convolutions(self) -> int:
        """Modules run in the order in which they are registered; the probe at load proves it."""
        place = Place()
        dtype = self.module.dtype
        for name, part in self.module.named_modules():
            if is_kind(part, "CausalConvNet") and part.padding:
                self._pool.add(name, (part.conv.in_channels, part.padding), dtype)
                self._convs.follow(name, part.conv, part.padding, place)
            elif is_kind(part, "CausalTransConvNet"):
                late = part.left_pad > 0
                stride = part.conv.stride[0]
                if late:
                    self._pool.add(name, (part.conv.in_channels, 1), dtype)
                    self._convs.follow_transposed(name, part, place)
                place = place.upsampled(stride, late=late)
        return place.lag


def plan_code2wav(stage: ResolvedStage, device: str) -> LoadPlan:
    """What `build_code2wav` loads, from configurations and headers."""
    from transformers import AutoConfig, Qwen3OmniMoeCode2Wav

    folder = Path(stage.model_path)
    return plan_transformers(
        Qwen3OmniMoeCode2Wav,
        folder,
        config=AutoConfig.from_pretrained(folder, local_files_only=True).code2wav_config,
        prefix="code2wav.",
        dtype=stage.dtype,
        device=device,
        attn_implementation="sdpa",
    )


def build_code2wav(
    stage: ResolvedStage, device: str, max_streams: int, report: LoadReporter
) -> StreamedCode2Wav:
    """A `CodecModelFactory`: the part "code2wav." of the stage's checkpoint. Raises
    `CheckpointError`, and `UnsupportedCombinationError` where the gate refuses it."""
    module: Any = load_planned(plan_code2wav(stage, device), report)
    model = StreamedCode2Wav(module, device=device, max_streams=max_streams)
    report("comparing the codec decoder in pieces with one pass", None)
    check_against_one_pass(model)
    platform = platform_of(device)
    if not stage.enforce_eager and platform.graphs_unavailable_reason() is None:
        options = read_generation_options(stage)
        sizes = options.piece_sizes if options.async_chunk else ()
        model.capture(platform, max_batch=stage.max_num_seqs, sizes=sizes, report=report)
    return model
