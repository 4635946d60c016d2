"""Families by import string: the runtime knows no model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from omnistage.contracts.errors import ConfigurationError
from omnistage.diffusion.family import StepFamily

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def load_family(path: str, pipeline: DiffusionPipeline) -> StepFamily:
    """The family that `path` ("package.module:Name") names, for a loaded pipeline.

    Raises `ConfigurationError` where there is no such `StepFamily`.
    """
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"option step_family {path!r} cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, StepFamily)):
        raise ConfigurationError(f"option step_family {path!r} is no StepFamily")
    return found(pipeline)
