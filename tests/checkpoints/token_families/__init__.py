"""All token models by name: those that are served, and those that try the gate at load."""

from __future__ import annotations

from . import decoders, gate, qwen2_5_omni, qwen3_omni
from .family import TokenFamily

TOKEN_FAMILIES: dict[str, TokenFamily] = {
    family.name: family
    for module in (decoders, gate, qwen2_5_omni, qwen3_omni)
    for family in vars(module).values()
    if isinstance(family, TokenFamily)
}
