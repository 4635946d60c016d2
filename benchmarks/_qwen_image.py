"""Qwen-Image at its full size without a checkpoint, for diffusers and for our denoising runtime.

Weights are random and prompts are embedded by a stand-in: times do not depend on either. All else
is the production code of both sides.
"""

from __future__ import annotations

import copy
import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from omnistage.config.pipeline import ExecutionType, StageConfig
from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.modalities import Modality
from omnistage.diffusion.fast_path import FastPath
from omnistage.diffusion.options import read_options
from omnistage.diffusion.request_runner import RequestRunner
from omnistage.diffusion.runtime import DiffusionRuntime
from omnistage.diffusion.step_runner import StepRunner
from omnistage.diffusion.step_setup import make_step_runner
from omnistage.diffusion.variants import PipelineVariants
from omnistage.platforms.registry import platform_of

FULL = {
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
TINY = {
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
SCHEDULE = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
"""Of the published checkpoint."""
TRUE_CFG_SCALE = 4.0
FAMILY = "omnistage.models.qwen_image.steps:QwenImageSteps"


class EmbeddedPipeline(QwenImagePipeline):
    """diffusers' own, but for the text encoder: a prompt "12 of a cat" has 12 random tokens."""

    def _get_qwen_prompt_embeds(self, prompt: Any, device: Any = None, dtype: Any = None) -> Any:
        texts = [prompt] if isinstance(prompt, str) else prompt
        width = self.transformer.config.joint_attention_dim
        lengths = [int(text.split()[0]) for text in texts]
        embeds = torch.zeros(len(texts), max(lengths), width)
        mask = torch.zeros(len(texts), max(lengths), dtype=torch.long)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
            embeds[row, :length] = torch.randn(length, width, generator=generator)
            mask[row, :length] = 1
        place = self._execution_device
        return embeds.to(place, self.transformer.dtype), mask.to(place)


@torch.no_grad()
def build(device: str, *, tiny: bool) -> EmbeddedPipeline:
    """On a GPU in bfloat16."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            transformer = QwenImageTransformer2DModel(**(TINY if tiny else FULL))
            vae = AutoencoderKLQwenImage(**({"base_dim": 8, "num_res_blocks": 1} if tiny else {}))
    finally:
        torch.set_default_dtype(before)
    for weight in transformer.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.02)
    return over(transformer.eval(), vae.eval())


def over(transformer: Any, vae: Any) -> EmbeddedPipeline:
    pipeline = EmbeddedPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULE),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def twin(pipeline: EmbeddedPipeline) -> EmbeddedPipeline:
    """A pipeline with modules of its own over the same weights: what is done to one of them
    (attention processors, compiled blocks) does not touch the other."""
    weights = {id(one): one for one in pipeline.transformer.parameters()}
    return over(copy.deepcopy(pipeline.transformer, weights), pipeline.vae)


def stage_of(device: str, *, options: Mapping[str, Any] = {}, **settings: Any) -> ResolvedStage:
    config = StageConfig(
        stage_id=0,
        name="diffusion",
        execution_type=ExecutionType.DIFFUSION,
        runtime="omnistage.diffusion.runtime:DiffusionRuntime",
        final_output=True,
        output_modality=Modality.IMAGE,
    )
    return ResolvedStage(
        stage=config,
        model_path="qwen-image",
        process="inline",
        devices=(device,),
        options={"step_family": FAMILY, "supports_request_batch": True, **options},
        **settings,
    )


@dataclass
class Ours:
    """What an executor makes of a loaded pipeline, and its scheduler."""

    pipeline: EmbeddedPipeline
    stage: ResolvedStage
    scheduler: Any = None
    runner: StepRunner | RequestRunner = field(init=False)
    fast_path: FastPath = field(init=False)

    def __post_init__(self) -> None:
        stage, device = self.stage, self.stage.devices[0]
        options, platform = read_options(stage.options), platform_of(device)
        self.new_scheduler()
        variants = PipelineVariants(self.pipeline, options)
        self.fast_path = FastPath(stage, options, platform, device)
        self.fast_path.install(self.pipeline)
        if stage.step_execution:
            self.runner = make_step_runner(
                stage, options, variants, self.fast_path, platform, device
            )
        else:
            self.runner = RequestRunner(variants, options, {}, platform, device)

    def new_scheduler(self) -> Any:
        self.scheduler = DiffusionRuntime.scheduler(self.stage)
        return self.scheduler

    def with_scheduler_of(self, stage: ResolvedStage) -> Ours:
        """The same model under another stage's scheduler."""
        other = copy.copy(self)
        other.stage = stage
        return other

    def release(self, key: Any) -> None:
        if isinstance(self.runner, StepRunner):
            self.runner.release(key)

    def close(self) -> None:
        if isinstance(self.runner, StepRunner):
            self.runner.close()
        self.fast_path.close()


def call_arguments(
    size: int, steps: int, prompt_tokens: int, negative_tokens: int, number: int
) -> dict[str, Any]:
    """As diffusers' pipeline takes them."""
    return {
        "prompt": f"{prompt_tokens} tokens of request {number}",
        "negative_prompt": f"{negative_tokens} tokens to avoid",
        "height": size,
        "width": size,
        "num_inference_steps": steps,
        "true_cfg_scale": TRUE_CFG_SCALE,
    }


def step_ms(
    run: Callable[[Callable[[int], None]], None], device: str, warm_steps: int, steps: int
) -> float:
    """Milliseconds a step of `run`, which calls back with the number of steps done. The device is
    waited for before the first counted step and after the last one only."""
    platform, marks = platform_of(device), {}

    def stepped(done: int) -> None:
        if done in (warm_steps, warm_steps + steps):
            platform.synchronize(device)
            marks[done] = time.perf_counter()

    run(stepped)
    return (marks[warm_steps + steps] - marks[warm_steps]) / steps * 1e3


class Partial:
    """Results as far as they are, in a file that is written anew after each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.values: dict[str, Any] = {}

    def add(self, **found: Any) -> None:
        self.values |= found
        for name, value in found.items():
            print(f"{name}: {json.dumps(value)}", flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.values, indent=2) + "\n")
