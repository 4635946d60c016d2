"""Which key of a checkpoint belongs to which parameter or buffer of a module.

`diffusers` modules are named as their checkpoints, but for attention blocks of early autoencoders.
`transformers` renames, and sometimes converts, by a mapping of its own, which is applied here as
its loader applies it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.memory.conversion import ConvertedKeys
from omnistage.memory.skeleton import library_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Renaming:
    """`names` maps key to name, also where the module has no such name. Not among them are keys
    that the library transforms (fuses, splits, transposes) rather than renames: `converted` has
    those, by the first name that comes of them."""

    names: Mapping[str, str]
    converted: Mapping[str, ConvertedKeys] = field(default_factory=dict)


def rename(
    module: torch.nn.Module, keys: Iterable[str], *, sharded: bool, whole_type: str | None = None
) -> Renaming:
    """Resolve every key of a checkpoint for this module. `whole_type` is the `model_type` of the
    model that this one is a part of."""
    if library_of(type(module)) == "diffusers":
        names = {key: key for key in keys}
        if sharded:  # diffusers renames in checkpoints of one file only
            return Renaming(names=names)
        renamed = module._fix_state_dict_keys_on_load(dict(names))
        return Renaming(names={key: name for name, key in renamed.items()})
    return _rename_for_transformers(module, keys, whole_type)


def _rename_for_transformers(
    module: torch.nn.Module, keys: Iterable[str], whole_type: str | None
) -> Renaming:
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = _mapping(module, whole_type)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = module.base_model_prefix
    state = module.state_dict()
    names: dict[str, str] = {}
    converted: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state and pattern is not None:
            converted.setdefault(name, []).append((pattern, key))
        else:
            names[key] = name
    return Renaming(
        names=names,
        converted={
            name: ConvertedKeys(converter=by_pattern[entries[0][0]], keys=tuple(entries))
            for name, entries in converted.items()
        },
    )


def _mapping(module: torch.nn.Module, whole_type: str | None) -> list[Any]:
    """The library's mapping for this class; of a part, that of the whole as well, which the
    library registers for wholes only."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        get_model_conversion_mapping,
    )

    mapping = get_model_conversion_mapping(module)
    return mapping + (get_checkpoint_conversion_mapping(whole_type) or [] if whole_type else [])


def is_ignored(module: torch.nn.Module, name: str) -> bool:
    """Whether the library says that its loader may leave this stored tensor unused."""
    patterns = set(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    if library_of(type(module)) == "transformers":
        patterns |= _formerly_stored(name for name, _ in module.named_buffers())
    return any(re.search(pattern, name) for pattern in patterns)


def _formerly_stored(buffers: Iterable[str]) -> Collection[str]:
    """Buffers that transformers computes today and stored once; as in its
    `_adjust_missing_and_unexpected_keys`."""
    patterns = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"position_ids$"}
    names = list(buffers)
    return {
        pattern
        for ending, pattern in patterns.items()
        if any(name.endswith(ending) for name in names)
    }


def wanted_float32(module: torch.nn.Module, names: Iterable[str], dtype: str) -> set[str]:
    """The names that the library keeps in float32 when the rest is loaded as `dtype`."""
    import torch

    if library_of(type(module)) == "diffusers":
        kept = module._keep_in_fp32_modules or ()
        kept = {kept} if isinstance(kept, str) else set(kept)
        return {name for name in names if kept & set(name.split("."))}
    patterns = [
        pattern.replace("*", ".*") for pattern in module._get_dtype_plan(getattr(torch, dtype))
    ]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
