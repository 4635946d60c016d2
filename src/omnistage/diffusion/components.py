"""Which component of a `diffusers` pipeline plays which part, told from its name.

Pipelines declare nothing about it; their component names are a convention of the library
(surveyed over all pipelines of diffusers 0.42).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import ConfigurationError
from omnistage.memory.offload.discovery import AUTOENCODER_NAMES, DENOISER_NAME

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """Modules by component name. `decoders` are the halves of the autoencoders that turn latents
    into pictures: `decode` is no forward call, but the decoder inside it is."""

    denoisers: dict[str, nn.Module]
    decoders: dict[str, nn.Module]
    encoders: dict[str, nn.Module]


def find_parts(pipeline: DiffusionPipeline) -> PipelineParts:
    """Raises `ConfigurationError` when nothing in the pipeline looks like a denoiser, for then its
    runs could be neither watched nor cancelled."""
    from torch import nn

    components = pipeline.components
    modules = {name: part for name, part in components.items() if isinstance(part, nn.Module)}
    denoisers = {name: part for name, part in modules.items() if DENOISER_NAME.fullmatch(name)}
    if not denoisers:
        raise ConfigurationError(
            f"{type(pipeline).__name__} has no component that is known as a denoiser; "
            f"its modules are: {', '.join(modules) or 'none'}"
        )
    decoders = {
        name: modules[name].decoder
        for name in AUTOENCODER_NAMES
        if isinstance(getattr(modules.get(name), "decoder", None), nn.Module)
    }
    others = {
        name: part
        for name, part in modules.items()
        if name not in denoisers and name not in AUTOENCODER_NAMES
    }
    return PipelineParts(denoisers=denoisers, decoders=decoders, encoders=others)


def schedulers_of(pipeline: DiffusionPipeline) -> list[Any]:
    """Those in force now: a request may bring its own."""
    return [part for part in pipeline.components.values() if hasattr(part, "set_timesteps")]


def autoencoder(pipeline: DiffusionPipeline) -> Any:
    """The picture autoencoder, or None."""
    return next(
        (
            found
            for name in AUTOENCODER_NAMES
            if (found := pipeline.components.get(name)) is not None
        ),
        None,
    )
