"""Placements that stream blocks, and changed copies of checkpoints to load with them."""

from __future__ import annotations

from omnistage.memory.offload.host import HostBacking
from omnistage.memory.placement import ComponentPlacement, Placement, Residency

LISTS = {
    "flux": {"transformer": ("transformer_blocks", "single_transformer_blocks")},
    "qwen_image": {
        "transformer": ("transformer_blocks",),
        "text_encoder": ("model.language_model.layers",),
    },
    "sd3": {"transformer": ("transformer_blocks",)},
    "sd15": {"unet": ("down_blocks", "up_blocks")},
    "lumina2": {"transformer": ("layers",), "text_encoder": ("layers",)},
}
"""Where the blocks of some families are: by component, the names of lists of modules."""


def blocks_of(plan, family):
    """By component, the paths of a family's blocks."""
    return {
        component: tuple(
            dict.fromkeys(
                f"{one}.{name[len(one) + 1 :].split('.')[0]}"
                for one in lists
                for name in plan.modules[component].sources
                if name.startswith(f"{one}.")
            )
        )
        for component, lists in LISTS[family].items()
    }


def streaming(blocks, backing=HostBacking.CHECKPOINT, swapped=()):
    """A placement of these blocks, by component."""
    streamed = {
        name: _component(name, Residency.STREAMED, tuple(paths)) for name, paths in blocks.items()
    }
    waiting = {name: _component(name, Residency.SWAPPED) for name in swapped}
    return Placement(strategy="layerwise", components=streamed | waiting, backing=backing)


def _component(name, residency, paths=()):
    return ComponentPlacement(
        component=name, residency=residency, weight_bytes=0, streamed_blocks=paths
    )
