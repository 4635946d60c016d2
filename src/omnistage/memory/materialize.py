"""Carries a plan out: fills a skeleton from its files, each tensor read once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.filling import BytesReporter, Filler
from omnistage.memory.host.layout import host_views
from omnistage.memory.host.preflight import block_of, block_sources
from omnistage.memory.names import and_more
from omnistage.memory.plan import LoadPlan, SourceKind
from omnistage.memory.reading import TensorFiles
from omnistage.memory.skeleton import PROCESS_WIDE

if TYPE_CHECKING:
    import torch

    from omnistage.memory.host.seams import BlockTransform
    from omnistage.memory.host.weight_plan import ComponentWeights
    from omnistage.memory.offload.host import HostWeights
    from omnistage.memory.offload.sharding import Share


def materialize(
    plan: LoadPlan,
    loaded: BytesReporter = lambda nbytes: None,
    *,
    transform: BlockTransform | None = None,
) -> torch.nn.Module:
    """The module of a plan, in evaluation mode, without gradients, on the plan's device.

    Never holds more than one tensor, or the parts of one conversion, besides the module; with a
    `transform`, one block more. On the CPU a tensor whose dtype is as stored is a private mapping
    of its file and is not copied. Raises `CheckpointError` when a file changed since it was
    planned.
    """
    if plan.by_library:
        assert transform is None, f"{plan.component}: read by its library, cannot be converted"
        module = _by_library(plan)
        loaded(plan.total_bytes)
    else:
        module = plan.skeleton.take()
        with TensorFiles() as files:
            filler = Filler(plan, module, files, loaded)
            _fill_resident(filler, (), transform)
        _finish(module, plan, loaded, transform)
    _check_complete(module, plan)
    return module.eval().requires_grad_(False)


def materialize_streamed(
    plan: LoadPlan,
    streaming: ComponentWeights,
    loaded: BytesReporter = lambda nbytes: None,
    *,
    transform: BlockTransform | None = None,
    share: Share | None = None,
) -> tuple[torch.nn.Module, HostWeights]:
    """As `materialize`, but the blocks of `streaming` stay on the host: their parameters and
    persistent buffers are views of the returned weights, which the caller owns.

    What is packed is packed block by block as it is read, so that the host holds it once, and one
    block; with a `share`, only that is kept of each block, whose tensors are stand-ins then. Blocks
    touch the device only to be converted there by `transform`.
    """
    assert not plan.by_library, f"{plan.component}: read by its library, cannot be streamed"
    module = plan.skeleton.take()
    with TensorFiles() as files:
        filler = Filler(plan, module, files, loaded, streaming.paths)
        if streaming.opened is not None:
            weights = streaming.opened
            _put_opened(filler, weights, transform)
        else:
            weights = _pack(filler, transform, share if streaming.cache is None else None)
        try:
            _fill_resident(filler, streaming.paths, transform)
            _finish(module, plan, loaded, transform)
            if streaming.cache is not None:
                weights = streaming.cache.publish(plan, weights, transform)
                _rebind(module, weights)
            _check_complete(module, plan, streaming.paths)
        except BaseException:
            weights.close()
            raise
    return module.eval().requires_grad_(False), weights


def _put_opened(filler: Filler, weights: HostWeights, transform: BlockTransform | None) -> None:
    from omnistage.memory.host.modules import put, put_empty

    if transform is not None:
        put_empty(filler.module, filler.plan, filler.streamed)
    for path, block in weights.blocks.items():
        if transform is not None:
            transform(filler.module, path)
        for name, view in host_views(block).items():
            put(filler.module, name, view)
        filler.count_as_loaded(block_sources(filler.plan, path))


def _pack(filler: Filler, transform: BlockTransform | None, share: Share | None) -> HostWeights:
    from omnistage.memory.host.private import BlockPacker
    from omnistage.memory.offload.shares import SharePacker

    sources = {path: block_sources(filler.plan, path) for path in filler.streamed}
    nbytes = sum(source.nbytes for block in sources.values() for source in block.values())
    packer = BlockPacker(nbytes) if share is None else SharePacker(share, nbytes)
    try:
        for path, block in sources.items():
            filler.fill(block, filler.plan.device if transform else "cpu")
            if transform is not None:
                transform(filler.module, path)
            packer.add(filler.module, path)
        return packer.finish()
    except BaseException:
        packer.close()
        raise


def _rebind(module: torch.nn.Module, weights: HostWeights) -> None:
    from omnistage.memory.host.modules import streamed_tensors

    for path, block in weights.blocks.items():
        tensors = streamed_tensors(module, path)
        for name, view in host_views(block).items():
            tensors[name].data = view


def _fill_resident(
    filler: Filler, streamed: tuple[str, ...], transform: BlockTransform | None
) -> None:
    """With a `transform`, block after block, so that never all is there unconverted."""
    if transform is not None:
        for path in _other_blocks(filler.module, streamed):
            filler.fill(block_sources(filler.plan, path))
            transform(filler.module, path)
    filler.fill(filler.plan.sources)


def _other_blocks(module: torch.nn.Module, streamed: Iterable[str]) -> list[str]:
    """The members of the outermost lists of modules, except where blocks are streamed."""
    import torch

    taken, found = list(streamed), []
    for name, child in module.named_modules():
        for index in range(len(child)) if isinstance(child, torch.nn.ModuleList) else ():
            path = f"{name}.{index}"
            if not any(_overlap(path, other) for other in taken):
                taken.append(path)
                found.append(path)
    return found


def _overlap(first: str, second: str) -> bool:
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def _finish(
    module: torch.nn.Module,
    plan: LoadPlan,
    loaded: BytesReporter,
    transform: BlockTransform | None,
) -> None:
    _tie(module, plan)
    _place_computed(module, plan, loaded)
    if transform is not None:
        transform(module, "")


def _tie(module: torch.nn.Module, plan: LoadPlan) -> None:
    """Tie by the model's own rule, which also unties what a checkpoint stores as different."""
    if plan.library == "transformers" and module.all_tied_weights_keys:
        tied = {name for name, source in plan.sources.items() if source.kind is SourceKind.TIED}
        with PROCESS_WIDE:
            module.tie_weights(missing_keys=tied, recompute_mapping=False)


def _place_computed(module: torch.nn.Module, plan: LoadPlan, loaded: BytesReporter) -> None:
    from omnistage.memory.host.modules import put

    for name, source in plan.sources.items():
        if source.kind is SourceKind.COMPUTED:
            put(module, name, module.get_buffer(name).to(source.device))
            loaded(source.nbytes)


def _by_library(plan: LoadPlan) -> torch.nn.Module:
    import torch
    import transformers

    assert plan.gguf_file is not None
    unpacked = getattr(transformers, "GgufConfig", None)  # before it, all was unpacked
    what = f"{plan.gguf_file} does not fit {plan.component} ({plan.cls.__name__})"
    try:
        with PROCESS_WIDE:
            module, info = plan.cls.from_pretrained(
                plan.folder,
                config=plan.skeleton.config,
                gguf_file=plan.gguf_file.name,
                dtype=getattr(torch, plan.dtype),
                device_map={"": plan.device},
                local_files_only=True,
                output_loading_info=True,
                **plan.skeleton.implementations.arguments,
                **({"quantization_config": unpacked(dequantize=True)} if unpacked else {}),
            )
    except Exception as error:  # the file is the user's: what the library raises for it varies
        raise CheckpointError(f"{what}: {' '.join(str(error).split())}") from error
    problems = [f"{kind} {and_more(map(str, keys))}" for kind, keys in info.items() if keys]
    if problems:
        raise CheckpointError(f"{what}: {'; '.join(problems)}")
    return module


def _check_complete(
    module: torch.nn.Module, plan: LoadPlan, streamed: tuple[str, ...] = ()
) -> None:
    """Whatever happened above: nothing may be left without a value or in the wrong place."""
    import torch

    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    on_host = {
        name
        for name in tensors
        if block_of(name, streamed) is not None
        and not (name in plan.sources and plan.sources[name].kind is SourceKind.COMPUTED)
    }
    elsewhere = [
        name
        for name, tensor in tensors.items()
        if not _is_on(tensor, torch.device("cpu" if name in on_host else plan.device))
    ]
    assert not empty, f"{plan.component}: left without a value: {empty}"
    assert not elsewhere, f"{plan.component}: not on {plan.device} or the host: {elsewhere}"


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
