"""Which layers of a component are quantized: the linear ones inside its repeated blocks.

Embeddings and projections into and out of the blocks stay in full precision: they are small, and
what errs there errs everywhere. So does modulation, unless it is asked for: it errs everywhere too,
but may be a third of a block's bytes (Qwen-Image).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from omnistage.quantization.config import EVERYTHING, Fp8Settings, QuantizationPlan
from omnistage.quantization.fp8 import Fp8Linear

_KEPT = re.compile(r"time|timestep|temb|embed\w*|router")
_MODULATION = re.compile(r"norm\d*|mod|modulation|ada|adaln\w*")
_DENOISER = re.compile(r"Transformer|UNet|DiT|ControlNet|Prior")
_MODEL_BASES = {
    ("diffusers.models.modeling_utils", "ModelMixin"): "diffusers",
    ("transformers.modeling_utils", "PreTrainedModel"): "transformers",
}


def is_denoiser(module: nn.Module) -> bool:
    """Whether a method without a component's name is meant for it: a model of diffusers that has
    repeated blocks or is called as denoisers are."""
    cls = type(module)
    named = bool(getattr(cls, "_repeated_blocks", None)) or bool(_DENOISER.search(cls.__name__))
    return _library(cls) == "diffusers" and named and not cls.__name__.startswith("Autoencoder")


def is_quantizable(module: nn.Module) -> bool:
    """Denoisers, and models of transformers (text encoders)."""
    return is_denoiser(module) or _library(type(module)) == "transformers"


def select_layers(
    module: nn.Module, plan: QuantizationPlan, component: str
) -> dict[str, Fp8Settings]:
    """Settings by path of the layers that are plain `nn.Linear` now and are to be quantized.

    A prefix that does not name the component reaches denoisers only.
    """
    if not is_quantizable(module):
        return {}
    by_name_only = not is_denoiser(module)
    chosen: dict[str, Fp8Settings] = {}
    for path, layer in block_layers(module):
        name = f"{component}.{path}"
        settings = plan.settings_of(name)
        unnamed = by_name_only and plan.prefix_of(name) == EVERYTHING
        if type(layer) is not nn.Linear or settings is None or unnamed:
            continue
        if not is_modulation(path):
            chosen[path] = settings
        elif settings.modulation:
            chosen[path] = replace(settings, compute="bf16")
    return chosen


def block_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers, quantized ones too, inside repeated blocks and not of a kind that is always
    kept, by every path they have."""
    blocks = block_paths(module)
    precise = _kept_in_float32(module)
    for path, layer in module.named_modules(remove_duplicate=False):
        block = next((one for one in blocks if path.startswith(f"{one}.")), None)
        if block is None or not isinstance(layer, nn.Linear | Fp8Linear):
            continue
        inner = path.removeprefix(f"{block}.")
        if not keeps_precision(inner) and precise.isdisjoint(path.split(".")):
            yield path, layer


def block_paths(module: nn.Module) -> tuple[str, ...]:
    """The outermost modules of the classes that diffusers (`_repeated_blocks`) or either library
    (`_no_split_modules`) lists; without such, the entries of the outermost `ModuleList`s."""
    for attribute in ("_repeated_blocks", "_no_split_modules"):
        classes = set(getattr(module, attribute, None) or ())
        found = _outermost(module, lambda part, names=classes: type(part).__name__ in names)
        if found:
            return found
    lists = _outermost(module, lambda part: isinstance(part, nn.ModuleList))
    return tuple(f"{path}.{name}" for path in lists for name, _ in _children(module, path))


def keeps_precision(inner: str) -> bool:
    """By the name in its block: what embeds, gates and routers."""
    parts = inner.lower().split(".")
    gated = any(part == "gate" or part.endswith("_gate") for part in parts)
    return gated or any(_KEPT.fullmatch(token) for token in _tokens(inner))


def is_modulation(path: str) -> bool:
    """Whether a linear layer makes shifts, scales and gates of a norm: it sees a row or two a
    sample, and what errs there errs in every token."""
    return any(_MODULATION.fullmatch(token) for token in _tokens(path))


def _tokens(path: str) -> list[str]:
    return [token for part in path.lower().split(".") for token in part.split("_")]


def _kept_in_float32(module: nn.Module) -> set[str]:
    """Names of modules that the library does not even load in half precision."""
    kept: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names = getattr(module, attribute, None) or ()
        kept |= {names} if isinstance(names, str) else set(names)
    return kept


def _outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> tuple[str, ...]:
    found: list[str] = []
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found[-1:])
        if path and wanted(part) and not inside:
            found.append(path)
    return tuple(found)


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    return module.get_submodule(path).named_children()


def _library(cls: type) -> str | None:
    bases = ((base.__module__, base.__name__) for base in cls.__mro__)
    return next((_MODEL_BASES[base] for base in bases if base in _MODEL_BASES), None)
