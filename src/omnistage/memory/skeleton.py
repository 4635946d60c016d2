"""Modules without weights: parameters on the meta device, computed buffers real.

Built by `accelerate.init_empty_weights`, since building under `torch.device("meta")` would lose
what a module computes in its constructor (rotary tables and the like).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import (
    CheckpointError,
    OmniError,
    UnsupportedCombinationError,
)
from omnistage.memory.quantized import check_readable, stored_quantization

if TYPE_CHECKING:
    import torch

WEIGHT_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
"""How each library names the weight files of a model."""

MODEL_BASES = {
    "diffusers": ("diffusers.models.modeling_utils", "ModelMixin"),
    "transformers": ("transformers.modeling_utils", "PreTrainedModel"),
}
"""The class that all models of a library derive from."""

PROCESS_WIDE = threading.RLock()
"""Held while the libraries change what holds for the whole process (how modules register
parameters, the default dtype), and by whatever would suffer from that."""


@dataclass(frozen=True, kw_only=True)
class Implementations:
    """Which kernels a `transformers` class is built for, None: as it chooses. `attention` may be a
    mapping from the names of sub-configurations ("text_config", "": the rest)."""

    attention: str | Mapping[str, str] | None = None
    experts: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """As `_from_config` and `from_pretrained` take them."""
        attention = self.attention
        given = {
            "attn_implementation": dict(attention) if isinstance(attention, Mapping) else attention,
            "experts_implementation": self.experts,
        }
        return {name: value for name, value in given.items() if value is not None}


def library_of(cls: type) -> str | None:
    """Whose model class this is: "diffusers", "transformers", or None when it is no such model.

    Imports neither: they import lazily, which fails in one of two threads that do it at a time.
    """
    bases = {(base.__module__, base.__name__) for base in cls.__mro__}
    return next((library for library, base in MODEL_BASES.items() if base in bases), None)


def read_config(cls: type, folder: Path, *, quantized: bool = False) -> Any:
    """The component's configuration as its library reads it.

    Raises `CheckpointError` when `config.json` is missing or malformed and
    `UnsupportedCombinationError` for a quantized checkpoint, but where `quantized`: then for one of
    a method that is not read.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder / 'config.json'} is missing; {cls.__name__} needs it")
    try:
        if library_of(cls) == "diffusers":
            config = cls.load_config(folder)
        else:
            config = _config_class(cls, folder).from_pretrained(folder, local_files_only=True)
    except OmniError:
        raise
    except Exception as error:  # the file is the user's: what a library raises for it varies
        raise CheckpointError(
            f"{folder / 'config.json'} is no configuration of {cls.__name__}: {error}"
        ) from error
    if quantized:
        check_readable(config, folder)
    elif stored_quantization(config):
        raise UnsupportedCombinationError(
            f"{folder} is a quantized checkpoint; models of this kind are loaded in full precision"
        )
    return config


def build_skeleton(
    cls: type, config: Any, folder: Path, dtype: str, implementations: Implementations
) -> torch.nn.Module:
    """An instance in evaluation mode whose parameters are empty, on the meta device.

    `dtype` is what its floating parameters will have (buffers that a class computes in the default
    dtype get it now). Weights are not tied yet. Raises `CheckpointError` when the class refuses the
    configuration.
    """
    import torch
    from accelerate import init_empty_weights

    library = library_of(cls)
    with PROCESS_WIDE, ExitStack() as contexts:
        contexts.enter_context(_default_dtype(getattr(torch, dtype)))
        contexts.enter_context(init_empty_weights(include_buffers=False))
        try:
            if library == "diffusers":
                module = cls.from_config(config)
                module.register_to_config(_name_or_path=str(folder))
            else:
                module = _transformers_skeleton(cls, config, folder, dtype, implementations)
        except OmniError:
            raise
        except Exception as error:  # as above: the configuration is the user's
            raise CheckpointError(
                f"{folder / 'config.json'} does not describe a {cls.__name__}: {error}"
            ) from error
    return module.eval()


def _transformers_skeleton(
    cls: type, config: Any, folder: Path, dtype: str, implementations: Implementations
) -> torch.nn.Module:
    import torch
    from transformers.initialization import no_init_weights

    config.name_or_path = str(folder)
    with no_init_weights():
        module = cls._from_config(config, dtype=getattr(torch, dtype), **implementations.arguments)
    if module.can_generate() and (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return module


def _config_class(cls: type, folder: Path) -> Any:
    from transformers import AutoConfig

    return cls.config_class or AutoConfig


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
