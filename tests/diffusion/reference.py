"""The same call in our words and in those of `diffusers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.contracts.runtime import StageRequest
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from tests.diffusion.driver import diffusion_request

PARAMETERS = frozenset(OmniDiffusionSamplingParams.__struct_fields__)


def reference_pipeline(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def reference_images(pipeline: Any, call: dict[str, Any], seed: int, output_type: str) -> Any:
    """What diffusers makes of `call`: an array or tensor, uint8 (n, h, w, c) for "pil"."""
    generator = torch.Generator("cpu").manual_seed(seed)
    images = pipeline(**call, generator=generator, output_type=output_type).images
    if output_type == "pil":
        return np.stack([np.asarray(image.convert("RGB")) for image in images])
    return images


def request_of(
    call: dict[str, Any], seed: int, output_type: str | None, request_id: str = "req"
) -> StageRequest:
    """A family's call as a request; what is no sampling parameter goes into `extra_args`."""
    call = dict(call)
    texts = {name: call.pop(name, None) for name in ("prompt", "negative_prompt")}
    images = tuple(np.asarray(call.pop(name)) for name in ("image",) if name in call)
    extra = {name: call.pop(name) for name in list(call) if name not in PARAMETERS}
    count = extra.pop("num_images_per_prompt", 1)
    return diffusion_request(
        **texts,
        images=images,
        **call,
        num_outputs_per_prompt=count,
        extra_args=extra,
        seed=seed,
        output_type=output_type,
        request_id=request_id,
    )


def as_tensor(images: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(images)) if isinstance(images, np.ndarray) else images


def same_bits(ours: Any, theirs: Any) -> bool:
    ours, theirs = as_tensor(ours), as_tensor(theirs)
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
