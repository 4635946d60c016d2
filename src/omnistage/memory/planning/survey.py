"""A look at every component of a pipeline without its weights: sizes and forward passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omnistage.memory.offload.discovery import part_of
from omnistage.memory.planning.inputs import (
    DENOISERS,
    Frame,
    Run,
    decode_run,
    encode_run,
    frame_of,
    latent_scales,
)
from omnistage.memory.planning.shape import RequestShape
from omnistage.memory.planning.sizes import ComponentSize, empty_module, size_of
from omnistage.memory.planning.work import PHASE_OF_PART

if TYPE_CHECKING:
    import torch

    from omnistage.config.resolved import ResolvedStage
    from omnistage.memory.host.seams import BlockTransform
    from omnistage.memory.pipeline_plan import PipelinePlan
    from omnistage.memory.planning.profile import ForwardProfile
    from omnistage.memory.planning.signatures import OpSignature

UNKNOWN_PIXEL_BYTES = {"denoise": 512, "decode": 4096}
"""Activations of classes that the planner does not know, a pixel of a frame and row: more than
those it knows take: Qwen-Image needs 400 and 3,460."""

UNKNOWN_ENCODER_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Survey:
    """`profile` None: the class is unknown, or did not run; then `activation_bytes` is an estimate
    and `note` says so. `passes` are those of a step, or of a request."""

    size: ComponentSize
    phase: str
    activation_bytes: int
    profile: ForwardProfile | None
    passes: int = 1
    rows: int = 1
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PipelineSurvey:
    """By component."""

    components: Mapping[str, Survey]
    shape: RequestShape
    dtype: str
    pixels_per_token: int
    notes: tuple[str, ...] = field(default=())

    @property
    def sizes(self) -> dict[str, ComponentSize]:
        return {name: one.size for name, one in self.components.items()}

    def tokens(self, component: str) -> int:
        """Of a forward pass of a denoiser, all rows together, text left out."""
        pixels = self.shape.height * self.shape.width * self.shape.frames
        return self.components[component].rows * pixels // self.pixels_per_token

    @property
    def ops(self) -> Counter[OpSignature]:
        """Of one request, by how often they run."""
        total: Counter[OpSignature] = Counter()
        for one in self.components.values():
            times = one.passes * (self.shape.steps if one.phase == "denoise" else 1)
            for op, count in one.profile.ops.items() if one.profile is not None else ():
                total[op] += times * count
        return total


def survey_pipeline(
    plan: PipelinePlan,
    stage: ResolvedStage,
    shape: RequestShape,
    transforms: Mapping[str, BlockTransform] | None = None,
) -> PipelineSurvey:
    """Nothing of the checkpoint is read. `transforms` quantize components, by name."""
    chosen = transforms or {}
    modules = {name: empty_module(one, chosen.get(name)) for name, one in plan.modules.items()}
    sizes = {
        name: size_of(one, modules[name], chosen.get(name), plan.pipeline_class)
        for name, one in plan.modules.items()
    }
    decoders = [name for name, size in sizes.items() if _phase_of(size) == "decode"]
    scales = latent_scales(modules[decoders[0]] if decoders else None)
    surveyed = {}
    for name, module in modules.items():
        view = _View(sizes[name], module, stage, shape, plan.dtype, scales)
        surveyed[name] = view.survey()
    notes = tuple(one.note for one in surveyed.values() if one.note)
    return PipelineSurvey(
        components=surveyed,
        shape=shape,
        dtype=plan.dtype,
        pixels_per_token=(2 * scales[0]) ** 2,
        notes=notes,
    )


def _phase_of(size: ComponentSize) -> str:
    """When it runs: for one that is declared resident, its name has to say."""
    part = part_of(size.component) if size.part == "resident" else size.part
    return PHASE_OF_PART[part]


class _View:
    """One component, for one shape."""

    def __init__(
        self,
        size: ComponentSize,
        module: torch.nn.Module,
        stage: ResolvedStage,
        shape: RequestShape,
        dtype: str,
        scales: tuple[int, int],
    ) -> None:
        self.size, self.module, self.shape = size, module, shape
        self.stage, self.dtype, self.scales = stage, dtype, scales
        self.cls_name = type(module).__name__
        self.phase = _phase_of(size)

    def survey(self) -> Survey:
        from omnistage.memory.planning.profile import profile_forward

        run, passes, rows = self._call()
        note = f"{self.size.component}: {self.cls_name} is unknown to the planner"
        if run is not None:
            paths = tuple(block.path for block in self.size.blocks)
            try:
                profile = profile_forward(self.module, run, block_paths=paths)
            except Exception as error:  # a variant of a known class: whatever it raises is told
                note = f"{self.size.component}: {self.cls_name} did not run without weights "
                note += f"({type(error).__name__}: {str(error).splitlines()[0][:120]})"
            else:
                return Survey(
                    size=self.size,
                    phase=self.phase,
                    activation_bytes=profile.peak_activation_bytes,
                    profile=profile,
                    passes=passes,
                    rows=rows,
                )
        return Survey(
            size=self.size,
            phase=self.phase,
            activation_bytes=self._estimate(rows),
            profile=None,
            passes=passes,
            rows=rows,
            note=f"{note}: its activations are an estimate, its time is unknown",
        )

    def _call(self) -> tuple[Run | None, int, int]:
        """What to run, how often a step or a request, and with how many rows."""
        requests, options = self.shape.requests, self.stage.options
        if self.phase == "encode":
            branches = 2 if self.shape.guided else 1
            rows = requests
            return encode_run(self.cls_name, rows, self.shape.text_tokens), branches, rows
        if self.phase == "decode":
            for feature in ("tiling", "slicing"):
                if options.get(f"vae_{feature}") and hasattr(self.module, f"enable_{feature}"):
                    getattr(self.module, f"enable_{feature}")()
            rows = 1 if self.runs_steps else requests
            return decode_run(self.cls_name, self._frame(rows, 0)), requests // rows, rows
        kind = DENOISERS.get(self.cls_name)
        branches = 2 if self.shape.guided and (kind is None or kind.branches != "none") else 1
        one_batch = kind is None or kind.branches == "one batch"
        if self.runs_steps:
            one_batch = bool(options.get("guidance_in_one_batch", True))
        rows, passes = (requests * branches, 1) if one_batch else (requests, branches)
        if kind is None:
            return None, passes, rows
        tokens = self.shape.text_tokens
        if tokens is None or kind.fixed_text:
            tokens = kind.text_tokens
        return kind.run(self._frame(rows, tokens)), passes, rows

    @property
    def runs_steps(self) -> bool:
        return self.stage.step_execution or self.stage.diffusion_streaming_output

    def _frame(self, rows: int, tokens: int) -> Frame:
        return frame_of(self.shape, rows, tokens, self.dtype, self.scales)

    def _estimate(self, rows: int) -> int:
        if self.phase == "encode":
            return rows * UNKNOWN_ENCODER_BYTES
        pixels = self.shape.height * self.shape.width * self.shape.frames
        return rows * pixels * UNKNOWN_PIXEL_BYTES[self.phase]
