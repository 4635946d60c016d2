"""Bytes of components and of their blocks, as they will be when loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.memory.offload.host import aligned

if TYPE_CHECKING:
    import torch

    from omnistage.memory.host.seams import BlockTransform
    from omnistage.memory.plan import LoadPlan

ALLOCATION_BYTES = 512
"""What torch's allocator rounds to."""

FIXED_PARTS = ("autoencoders", "resident")
"""Components that never leave the device."""


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """`image_bytes` is the block's image, `resident_bytes` what its tensors take by themselves."""

    path: str
    image_bytes: int
    resident_bytes: int


@dataclass(frozen=True, kw_only=True)
class ComponentSize:
    """`part` is "denoisers", "encoders", "autoencoders" or "resident". `blocks` are those that can
    stream, in execution order, `rest_bytes` all else. `is_mapped` says that the checkpoint's files
    hold the wanted bytes; `obstacle`, why its blocks cannot stream although it has some."""

    component: str
    part: str
    rest_bytes: int
    blocks: tuple[BlockSize, ...] = ()
    is_mapped: bool = False
    obstacle: str | None = None

    @property
    def weight_bytes(self) -> int:
        return self.rest_bytes + sum(block.resident_bytes for block in self.blocks)


def empty_module(plan: LoadPlan, transform: BlockTransform | None = None) -> torch.nn.Module:
    """The module of a plan on the meta device, with the dtypes that loading would give it, and
    quantized as it would be. Computed buffers are on the meta device as well."""
    import torch

    from omnistage.memory.host.modules import put

    module = plan.skeleton.take()
    for name, source in plan.sources.items():
        if source.tied_to is None:
            put(
                module,
                name,
                torch.empty(source.shape, dtype=getattr(torch, source.dtype), device="meta"),
            )
    for name, source in plan.sources.items():
        if source.tied_to is not None:
            path, _, leaf = source.tied_to.rpartition(".")
            _put_tied(module, name, getattr(module.get_submodule(path), leaf))
    if transform is not None:
        transform(module, "")
    return module.to("meta")


def _put_tied(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    owner._parameters[leaf] = tensor  # type: ignore[assignment]


def size_of(
    plan: LoadPlan,
    module: torch.nn.Module,
    transform: BlockTransform | None = None,
    pipeline_class: type | None = None,
) -> ComponentSize:
    """`module` is that of `empty_module`; what `pipeline_class` declares of it is heard."""
    from omnistage.memory.host.modules import layout_of, streamed_tensors
    from omnistage.memory.host.preflight import directly_mappable, shared_tensor
    from omnistage.memory.offload.discovery import part_of, plan_of, streamable_blocks
    from omnistage.memory.offload.placing import tensors_of

    part = part_of(plan.component, pipeline_class)
    declared = plan_of(pipeline_class)
    paths = [] if part in FIXED_PARTS else streamable_blocks(module, plan.component, declared, part)
    obstacle = shared_tensor(plan, paths)
    blocks = [
        BlockSize(
            path=path,
            image_bytes=layout_of(module, path).nbytes,
            resident_bytes=sum(
                aligned(tensor.nbytes, ALLOCATION_BYTES)
                for tensor in streamed_tensors(module, path).values()
            ),
        )
        for path in ([] if obstacle else paths)
    ]
    total_bytes = sum(
        aligned(tensor.nbytes, ALLOCATION_BYTES) for _, tensor in tensors_of([module])
    )
    return ComponentSize(
        component=plan.component,
        part=part,
        rest_bytes=total_bytes - sum(block.resident_bytes for block in blocks),
        blocks=tuple(blocks),
        is_mapped=bool(blocks) and transform is None and directly_mappable(plan, paths) is None,
        obstacle=obstacle,
    )


def by_part(sizes: Mapping[str, ComponentSize], part: str) -> list[ComponentSize]:
    return [size for size in sizes.values() if size.part == part]
