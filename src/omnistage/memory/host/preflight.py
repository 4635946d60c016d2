"""Whether the bytes of a checkpoint's files are, as they lie there, what a device needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omnistage.contracts.tensors import ITEM_BYTES
from omnistage.memory.plan import LoadPlan, SourceKind, TensorSource


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a component's blocks cannot be copied from its files. `name` is the first tensor."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


def block_of(name: str, paths: Sequence[str]) -> str | None:
    """The block that a tensor belongs to."""
    return next((path for path in paths if name.startswith(f"{path}.")), None)


def block_sources(plan: LoadPlan, path: str) -> dict[str, TensorSource]:
    """Of a block's parameters and persistent buffers, by name. Buffers that the class computes do
    not move with the block."""
    return {
        name: source
        for name, source in plan.sources.items()
        if name.startswith(f"{path}.") and source.kind is not SourceKind.COMPUTED
    }


def directly_mappable(plan: LoadPlan, paths: Sequence[str]) -> Refusal | None:
    """None when every tensor of every block lies in a file exactly as it is wanted. One that does
    not refuses them all: a component's blocks come from one kind of memory."""
    for path in paths:
        sources = block_sources(plan, path)
        if not sources:
            return Refusal(name=path, reason="has no tensors in the plan")
        for name, source in sources.items():
            reason = _obstacle(source)
            if reason:
                return Refusal(name=name, reason=reason)
    problem = shared_tensor(plan, paths)
    return Refusal(name=plan.component, reason=problem) if problem else None


def shared_tensor(plan: LoadPlan, paths: Sequence[str]) -> str | None:
    """In words, a tensor of a block that has another name as well: when the block's memory is
    given to another block, that name would lose it."""
    return next((words for words in _shared(plan, paths)), None)


def _shared(plan: LoadPlan, paths: Sequence[str]) -> Iterator[str]:
    for name, source in plan.sources.items():
        if source.kind is SourceKind.TIED and source.tied_to is not None:
            for one in (name, source.tied_to):
                path = block_of(one, paths)
                if path is not None:
                    yield f"{name} and {source.tied_to} are one tensor, and {path} is a block"


def _obstacle(source: TensorSource) -> str | None:
    if source.kind is not SourceKind.CHECKPOINT or source.offset_bytes is None:
        return f"does not lie in a file: it is {source.kind}"
    if source.stored_dtype != source.dtype:
        return f"is stored as {source.stored_dtype} and wanted as {source.dtype}"
    if source.offset_bytes % ITEM_BYTES[source.dtype]:
        return f"begins at byte {source.offset_bytes}, between two items of {source.dtype}"
    return None
