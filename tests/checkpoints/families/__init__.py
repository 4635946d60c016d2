"""All families by name."""

from __future__ import annotations

from ..family import Family
from . import cross_attention, flux, joint_attention, qwen_image, stable_diffusion

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (qwen_image, flux, stable_diffusion, cross_attention, joint_attention)
    for family in vars(module).values()
    if isinstance(family, Family)
}
