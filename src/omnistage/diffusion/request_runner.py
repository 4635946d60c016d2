"""Carries out request mode's command: one call of the unmodified pipeline, for one request or for
several that differ in prompt and seed only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import OutOfMemoryError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, ExecutionContext
from omnistage.diffusion.arguments import call_arguments, steps_of
from omnistage.diffusion.batching import pack, unpack
from omnistage.diffusion.failures import classify, invalid_numbers
from omnistage.diffusion.generators import make_generator
from omnistage.diffusion.inputs import DiffusionInputs, read_inputs
from omnistage.diffusion.options import DiffusionOptions
from omnistage.diffusion.outputs import is_finite, pictures, size_fields
from omnistage.diffusion.overrides import request_settings
from omnistage.diffusion.signature import signature_of
from omnistage.diffusion.variants import PipelineVariants, image_arguments
from omnistage.diffusion.watch import PipelineWatch

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

    from omnistage.platforms.base import Platform

_PROMPTS = ("prompt", "prompt_2", "prompt_3")
_OF_EACH = (*_PROMPTS, *(f"negative_{name}" for name in _PROMPTS))


class RequestRunner:
    """Nothing of a request outlives its command."""

    def __init__(
        self,
        variants: PipelineVariants,
        options: DiffusionOptions,
        defaults: Mapping[str, Any],
        platform: Platform,
        device: str,
    ) -> None:
        self._variants = variants
        self._options = options
        self._defaults = defaults
        self._platform = platform
        self._device = device

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        """Make the pictures of all children. Each one's fields: "seed", "output_type", "height",
        "width", "num_inference_steps", "peak_memory_mb", "timings_s"; its tensor: "images"."""
        inputs: list[DiffusionInputs] = []
        watch = None
        try:
            context.operation("encode")
            for payload in unpack(command.data):
                assert isinstance(payload, StageData)
                inputs.append(read_inputs(payload))
            pipeline = self._variants.choose(inputs[0])
            watch = PipelineWatch(pipeline, context, command.identities, self._synchronize)
            return self._generate(pipeline, inputs, watch, command.identities)
        except Exception as error:
            one = inputs[0] if inputs else None
            failure = classify(error, one, watch.denoiser_calls if watch else 0)
        if isinstance(failure, OutOfMemoryError):
            self._platform.empty_cache(self._device)
        raise failure

    def _synchronize(self) -> None:
        self._platform.synchronize(self._device)

    def _generate(
        self,
        pipeline: DiffusionPipeline,
        inputs: Sequence[DiffusionInputs],
        watch: PipelineWatch,
        identities: Sequence[RequestIdentity],
    ) -> StageData:
        import torch

        params = inputs[0].params
        output_type = params.output_type or "pil"
        arguments = self._arguments(pipeline, inputs)
        self._platform.peak_memory_mb(self._device, reset=True)
        with request_settings(pipeline, params), watch.attached(), torch.no_grad():
            result = pipeline(
                **arguments, generator=self._generators(inputs), output_type=output_type
            )
            images = pictures(result, output_type)
            if not (watch.output_is_finite() and is_finite(images)):
                raise invalid_numbers(pipeline)
        timings_s = watch.finish()
        default = signature_of(type(pipeline)).default("num_inference_steps")
        shared = {
            "output_type": output_type,
            **size_fields(images, output_type),
            "num_inference_steps": steps_of({"num_inference_steps": default} | arguments),
            "peak_memory_mb": self._platform.peak_memory_mb(self._device),
        }
        count = len(images) // len(identities)
        return pack(
            [
                StageData(
                    modality=Modality.IMAGE,
                    tensors={"images": images[i * count : (i + 1) * count]},
                    fields={**shared, "seed": one.params.seed, "timings_s": dict(timings_s)},
                )
                for i, one in enumerate(inputs)
            ]
        )

    def _arguments(
        self, pipeline: DiffusionPipeline, inputs: Sequence[DiffusionInputs]
    ) -> dict[str, Any]:
        """For several requests each text is a list; everything else is the same in all of them.

        A text stands there once an output: diffusers 0.42 gives the outputs of several prompts each
        other's masks (Qwen-Image's `encode_prompt` repeats texts and masks in different orders).
        """
        calls = [call_arguments(pipeline, one, self._options, self._defaults) for one in inputs]
        arguments = calls[0]
        if len(calls) == 1:
            return arguments | image_arguments(pipeline, inputs[0])
        count = arguments.pop("num_images_per_prompt", 1)
        texts = {
            name: [call[name] for call in calls for _ in range(count)]
            for name in _OF_EACH
            if all(name in call for call in calls)
        }
        idle = set(_OF_EACH) - set(texts)  # without guidance a default negative prompt is left out
        return {name: value for name, value in arguments.items() if name not in idle} | texts

    def _generators(
        self, inputs: Sequence[DiffusionInputs]
    ) -> torch.Generator | list[torch.Generator]:
        """One a picture for several requests; the pictures of one request draw from its own in
        turn, as they do when it runs alone."""
        made: list[Any] = [make_generator(one.params, self._device) for one in inputs]
        if len(made) == 1:
            return made[0]
        count = inputs[0].params.num_outputs_per_prompt
        return [generator for generator in made for _ in range(count)]
