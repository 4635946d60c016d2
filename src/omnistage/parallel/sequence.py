"""Sharing each sequence between ranks (Ulysses), by the context parallelism of `diffusers`.

Its `enable_parallelism` wants an accelerator and takes a rank's device from its number; the parts
it is made of (diffusers 0.42, models/modeling_utils.py) are put together here instead, over the
replica's own topology.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.parallel.groups import ProcessGroups, set_deadline
from omnistage.parallel.overlays import flag

if TYPE_CHECKING:
    from diffusers import ContextParallelConfig


def share_sequences(models: Mapping[str, Any], groups: ProcessGroups) -> Callable[[], None]:
    """Split the sequences of `models` (by component name) over the ranks of "sequence"; the outputs
    are whole on every rank. Lengths and numbers of heads need not be divisible. All ranks of the
    replica call it in the same order; returns what undoes it.

    Raises `UnsupportedCombinationError` naming a model that declares no plan for it, or has too few
    heads; then no model has been touched.
    """
    size = groups.size("sequence")
    if size == 1:
        return lambda: None
    for name, model in models.items():
        _check(name, model, size)
    from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel

    config = _context(groups, size)
    for model in models.values():
        _tell_attention(model, config)
        apply_context_parallel(model, config, model._cp_plan)

    def undo() -> None:
        for model in models.values():
            remove_context_parallel(model, model._cp_plan)
            _tell_attention(model, None)

    return undo


def _check(name: str, model: Any, size: int) -> None:
    kind = type(model).__name__
    where = f"{flag('sequence')} {size}"
    if not getattr(model, "_cp_plan", None):
        raise UnsupportedCombinationError(
            f"{where}: {kind} ({name}) declares no way to share a sequence (_cp_plan); use 1"
        )
    heads = getattr(model.config, "num_attention_heads", None)
    if heads is not None and -heads % size >= -(-heads // size):
        raise UnsupportedCombinationError(
            f"{where}: {kind} ({name}) has {heads} attention heads, too few to share; use a size "
            f"that divides them"
        )


def _context(groups: ProcessGroups, size: int) -> ContextParallelConfig:
    import torch
    from diffusers import ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    device = torch.device(groups.device)
    world = groups.topology.world_size
    mesh = init_device_mesh(
        device.type, (world // size, 1, size), mesh_dim_names=("data", "ring", "ulysses")
    )
    config = ContextParallelConfig(ulysses_degree=size, ulysses_anything=True)
    config.setup(groups.rank, world, device, mesh["ring", "ulysses"])
    # A mesh makes its groups with torch's own deadline of many minutes.
    for part in (config._flattened_mesh, config._ulysses_mesh):
        set_deadline(part.get_group(), groups.timeout_s)
    return config


def _tell_attention(model: Any, config: ContextParallelConfig | None) -> None:
    from diffusers import ParallelConfig

    parallel = None if config is None else ParallelConfig(context_parallel_config=config)
    model._parallel_config = parallel
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None and hasattr(processor, "_parallel_config"):
            processor._parallel_config = parallel
