"""Runs `diffusers` pipelines as they are: one call per command, watched through module hooks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.attention.registry import apply_backend, select_backend
from omnistage.contracts.errors import (
    ConfigurationError,
    InternalError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, ExecutionContext, LoadReporter
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.diffusion.arguments import RUNTIME_PARAMETERS, call_arguments
from omnistage.diffusion.components import find_parts
from omnistage.diffusion.failures import classify, invalid_numbers
from omnistage.diffusion.inputs import DiffusionInputs, read_inputs
from omnistage.diffusion.options import DiffusionOptions
from omnistage.diffusion.outputs import is_finite, pictures
from omnistage.diffusion.overrides import request_settings, set_autoencoder_feature
from omnistage.diffusion.scheduler import GENERATE
from omnistage.diffusion.signature import signature_of
from omnistage.diffusion.variants import PipelineVariants, image_arguments
from omnistage.diffusion.watch import PipelineWatch
from omnistage.memory.budget import MemoryBudget
from omnistage.memory.offload import resolve_offload
from omnistage.memory.pipeline_loader import load_pipeline, plan_pipeline
from omnistage.platforms.registry import platform_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from diffusers import DiffusionPipeline

    from omnistage.config.resolved import ResolvedStage


class DiffusionExecutor:
    """One rank's pipeline. Nothing of a request outlives its command."""

    def __init__(
        self, stage: ResolvedStage, options: DiffusionOptions, rank: int, world_size: int
    ) -> None:
        if world_size > 1:
            raise UnsupportedCombinationError(
                f"a diffusion stage of {world_size} ranks is not there yet; use one device"
            )
        self._stage = stage
        self._options = options
        self._device = stage.devices[rank]
        self._platform = platform_of(self._device)
        self._offload = resolve_offload(stage.offload)
        self._variants: PipelineVariants | None = None

    def load(self, report: LoadReporter) -> dict[str, Any]:
        """Build the pipeline by plan. Raises `ConfigurationError` for one that cannot be served
        or a default that it does not take."""
        stage = self._stage
        backend = select_backend(self._device, self._options.attention_backend)
        plan = plan_pipeline(
            Path(stage.model_path),
            dtype=stage.dtype,
            device=self._device,
            budget=MemoryBudget.of(stage.memory_budget_gib, self._device),
        )
        pipeline = load_pipeline(plan, report)
        pipeline.set_progress_bar_config(disable=True)
        for denoiser in find_parts(pipeline).denoisers.values():
            apply_backend(denoiser, backend)
        self._check_defaults(pipeline)
        try:
            for feature in ("tiling", "slicing"):
                wanted = getattr(self._options, f"vae_{feature}")
                if wanted is not None:
                    set_autoencoder_feature(pipeline, feature, wanted)
        except InvalidRequestError as error:
            raise ConfigurationError(error.message) from error
        self._offload.enable(pipeline)
        self._variants = PipelineVariants(pipeline, self._options)
        return {
            "pipeline_class": type(pipeline).__name__,
            "device": self._device,
            "dtype": plan.dtype,
            "attention_backend": backend.name,
            "weight_bytes": plan.total_bytes,
            "components": {
                name: type(part).__name__
                for name, part in pipeline.components.items()
                if part is not None
            },
        }

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        """Make the pictures of one child. The payload's fields: "seed", "output_type", "height",
        "width", "num_inference_steps", "peak_memory_mb", "timings_s"; its tensor: "images"."""
        if command.name != GENERATE:
            raise InternalError(f"a diffusion executor cannot {command.name!r}")
        inputs = watch = None
        try:
            context.operation("encode")
            inputs = read_inputs(command.data)
            pipeline = self._loaded.choose(inputs)
            watch = PipelineWatch(pipeline, context, command.identities[0], self._synchronize)
            return self._generate(pipeline, inputs, watch)
        except Exception as error:
            failure = classify(error, inputs, watch.denoiser_calls if watch else 0)
        if isinstance(failure, OutOfMemoryError):
            self._platform.empty_cache(self._device)
        raise failure

    def release(self, key: RequestKey) -> None:
        """Nothing to do: `execute` keeps nothing."""

    def control(self, method: str, arguments: dict[str, Any]) -> Any:
        raise InvalidRequestError(f"a diffusion stage has no control call {method!r}")

    def close(self) -> None:
        self._offload.disable()
        self._variants = None
        self._platform.empty_cache(self._device)

    @property
    def _loaded(self) -> PipelineVariants:
        if self._variants is None:
            raise InternalError("the diffusion stage has not loaded its model, or is closed")
        return self._variants

    def _synchronize(self) -> None:
        self._platform.synchronize(self._device)

    def _check_defaults(self, pipeline: DiffusionPipeline) -> None:
        """The stage's default sampling parameters must mean something to the loaded pipeline."""
        signature = signature_of(type(pipeline))
        defaults = dict(self._stage.default_sampling_params)
        extra = defaults.pop("extra_args", {})
        names = [name for name in defaults if name not in RUNTIME_PARAMETERS]
        unknown = [name for name in names if signature.spelling(name) is None]
        unknown += [name for name in extra if name not in signature]
        if unknown:
            refused = signature.refuse(unknown[0])
            raise ConfigurationError(f"default sampling parameters: {refused.message}")

    def _generate(
        self, pipeline: DiffusionPipeline, inputs: DiffusionInputs, watch: PipelineWatch
    ) -> StageData:
        import torch

        params = inputs.params
        output_type = params.output_type or "pil"
        defaults = self._stage.default_sampling_params
        signature = signature_of(type(pipeline))
        arguments = call_arguments(pipeline, inputs, self._options, defaults)
        arguments |= image_arguments(pipeline, inputs)
        self._platform.peak_memory_mb(self._device, reset=True)
        with request_settings(pipeline, params), watch.attached(), torch.no_grad():
            result = pipeline(
                **arguments, generator=self._generator(params), output_type=output_type
            )
            images = pictures(result, output_type)
            if not (watch.output_is_finite() and is_finite(images)):
                raise invalid_numbers(pipeline)
        timings_s = watch.finish()
        return StageData(
            modality=Modality.IMAGE,
            tensors={"images": images},
            fields={
                "seed": params.seed,
                "output_type": output_type,
                **_size(images, output_type),
                "num_inference_steps": arguments.get(
                    "num_inference_steps", signature.default("num_inference_steps")
                ),
                "peak_memory_mb": self._platform.peak_memory_mb(self._device),
                "timings_s": timings_s,
            },
        )

    def _generator(self, params: OmniDiffusionSamplingParams) -> torch.Generator:
        """On the CPU unless the caller wants the stage's device: equal seeds give equal noise
        everywhere."""
        import torch

        wanted = params.generator_device or "cpu"
        own = self._device.partition(":")[0]
        if wanted not in ("cpu", own, self._device):
            raise InvalidRequestError(
                f"generator_device {wanted!r} is not there; allowed: cpu, {own}",
                param="generator_device",
            )
        place = self._device if wanted == own else wanted
        assert params.seed is not None, "the scheduler draws a seed where the caller gives none"
        return torch.Generator(place).manual_seed(params.seed)


def _size(images: np.ndarray | torch.Tensor, output_type: str) -> dict[str, int]:
    """Height and width in pixels; nothing for latents, whose layout is the model's own."""
    if output_type == "latent":
        return {}
    first = 2 if output_type == "pt" else 1
    return {"height": images.shape[first], "width": images.shape[first + 1]}
