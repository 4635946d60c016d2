"""Requests that differ in all that requests of one batch may differ in, for each family."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from omnistage.contracts.runtime import StageRequest
from tests.checkpoints import FAMILIES, checkpoint
from tests.diffusion.reference import as_tensor, reference_images, reference_pipeline, request_of

LIMIT = 1e-5
LOUD_STD = 0.05

LONG_PROMPT = "a very blurry blue house under the tree with a robot and an old dog at the flower"

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen_image": {
        "plain": {"true_cfg_scale": 3.0},
        "long": {"negative_prompt": "bad", "true_cfg_scale": 2.0},
        "short": {"negative_prompt": None, "true_cfg_scale": 1.0},
        "late": {"negative_prompt": "low quality of a cat", "true_cfg_scale": 1.5},
    },
    "flux": {
        "plain": {"guidance_scale": 3.5},
        "long": {"negative_prompt": "bad quality", "true_cfg_scale": 2.0},
        "short": {"guidance_scale": 1.5, "prompt_2": "a tree at the house"},
        "late": {
            "negative_prompt": "low",
            "negative_prompt_2": "blurry",
            "true_cfg_scale": 1.5,
            "guidance_scale": 2.0,
        },
    },
    "flux_schnell": {
        "plain": {},
        "long": {"negative_prompt": "bad quality", "true_cfg_scale": 2.0},
        "short": {"prompt_2": "a tree at the house"},
        "late": {"negative_prompt": "low", "true_cfg_scale": 1.5},
    },
    "sd35": {
        "plain": {"guidance_scale": 2.0},
        "long": {"guidance_scale": 1.5, "prompt_3": "a tree", "clip_skip": 1},
        "short": {"guidance_scale": 1.0},
        "late": {"guidance_scale": 2.5, "negative_prompt": None, "prompt_2": "red flower"},
    },
}
"""What each request of a family sets beside `SHARED`."""

SHARED: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "a red cat", "num_inference_steps": 4},
    "long": {"prompt": LONG_PROMPT, "num_inference_steps": 6, "num_images_per_prompt": 2},
    "short": {"prompt": "dog", "num_inference_steps": 3},
    "late": {"prompt": "an image of the user at a tree", "num_inference_steps": 5},
}
SEEDS = {"plain": 7, "long": 8, "short": 9, "late": 10}
JOINS_AT = {"long": 2, "short": 3, "late": 5}

STEP_FAMILIES = sorted(VARIANTS)


def call_of(family: str, case: str) -> dict[str, Any]:
    call = {**FAMILIES[family].call, **SHARED[case], **VARIANTS[family][case]}
    return {name: value for name, value in call.items() if value is not None}


def cases(family: str, output_type: str, **changes: Any) -> dict[str, StageRequest]:
    return {
        case: request_of({**call_of(family, case), **changes}, SEEDS[case], output_type, case)
        for case in SHARED
    }


@cache
def pipeline_of(family: str) -> Any:
    return reference_pipeline(checkpoint(family))


@cache
def theirs(family: str, case: str, output_type: str) -> torch.Tensor:
    """What diffusers makes of the case when it runs alone."""
    images = reference_images(pipeline_of(family), call_of(family, case), SEEDS[case], output_type)
    return as_tensor(images).float()


def distance(ours: Any, reference: torch.Tensor) -> float:
    """The largest difference; infinite where shapes differ."""
    ours = as_tensor(ours).float()
    if ours.shape != reference.shape:
        return float("inf")
    return float((ours - reference).abs().max())


def limit_of(output_type: str) -> float:
    """Rounded to 8 bits, values that differ by less than `LIMIT` may fall one apart."""
    return 1.0 if output_type == "pil" else LIMIT
