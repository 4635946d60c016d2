"""What the call of a pipeline class takes."""

from __future__ import annotations

import difflib
import inspect
from functools import cache
from typing import Any

from omnistage.contracts.errors import InvalidRequestError

_SPELLINGS = {
    "num_outputs_per_prompt": ("num_images_per_prompt", "num_videos_per_prompt"),
    "fps": ("fps", "frame_rate"),
    "image_latent": ("image_latents",),
    "cfg_normalize": ("cfg_normalize", "cfg_normalization"),
}

OWNED_BY_RUNTIME = frozenset(
    {
        "prompt",
        "image",
        "mask_image",
        "generator",
        "output_type",
        "return_dict",
        "callback",
        "callback_steps",
        "callback_on_step_end",
        "callback_on_step_end_tensor_inputs",
        "num_images_per_prompt",
        "num_videos_per_prompt",
    }
)
"""Not allowed in `extra_args`."""


@cache
def signature_of(pipeline_class: type) -> CallSignature:
    return CallSignature(pipeline_class)


class CallSignature:
    """The parameters of a pipeline's `__call__`, with their defaults."""

    def __init__(self, pipeline_class: type) -> None:
        self.pipeline_class = pipeline_class
        parameters = inspect.signature(pipeline_class.__call__).parameters
        self._defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
        }

    def __contains__(self, name: str) -> bool:
        return name in self._defaults

    def default(self, name: str) -> Any:
        return self._defaults.get(name)

    def spelling(self, parameter: str) -> str | None:
        """The pipeline's own name of a sampling parameter, or None."""
        names = _SPELLINGS.get(parameter, (parameter,))
        return next((name for name in names if name in self._defaults), None)

    def refuse(self, name: str) -> InvalidRequestError:
        """The error for a parameter that this pipeline does not take."""
        allowed = sorted(set(self._defaults) - OWNED_BY_RUNTIME)
        nearest = difflib.get_close_matches(name, allowed, n=3, cutoff=0.6)
        hint = f"nearest: {', '.join(nearest)}" if nearest else f"it takes: {', '.join(allowed)}"
        return InvalidRequestError(
            f"{self.pipeline_class.__name__} does not take {name!r}; {hint}", param=name
        )
