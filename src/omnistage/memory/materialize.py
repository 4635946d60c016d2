"""Carries a plan out: fills a skeleton from its files, each read once, in the order of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.names import and_more
from omnistage.memory.plan import LoadPlan, SourceKind, TensorSource
from omnistage.memory.reading import TensorFiles
from omnistage.memory.skeleton import PROCESS_WIDE

if TYPE_CHECKING:
    import torch

BytesReporter = Callable[[int], None]
"""Called with the number of bytes that were just loaded."""


def materialize(plan: LoadPlan, loaded: BytesReporter = lambda nbytes: None) -> torch.nn.Module:
    """The module of a plan, in evaluation mode, without gradients, on the plan's device.

    Never holds more than one tensor, or the parts of one conversion, besides the module. On the CPU
    a tensor whose dtype is as stored is a private mapping of its file and is not copied. Raises
    `CheckpointError` when a file changed since it was planned.
    """
    if plan.by_library:
        module = _by_library(plan)
        loaded(plan.total_bytes)
    else:
        module = plan.skeleton.take()
        with TensorFiles() as files:
            for name, tensor in chain(_tensors(plan, files), _converted(plan, module, files)):
                _put(module, name, tensor)
                loaded(plan.sources[name].nbytes)
        _tie(module, plan)
        _place_computed(module, plan, loaded)
    _check_complete(module, plan)
    return module.eval().requires_grad_(False)


def _tensors(plan: LoadPlan, files: TensorFiles) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    by_file: dict[Path, list[tuple[int, str, TensorSource]]] = {}
    for name, source in plan.sources.items():
        if source.kind is SourceKind.CHECKPOINT:
            by_file.setdefault(source.file, []).append((source.offset_bytes, name, source))
    for file, entries in by_file.items():
        for _, name, source in sorted(entries, key=lambda entry: entry[:2]):
            tensor = files.read(file, source.key, source.stored_dtype, source.shape)
            yield name, tensor.to(source.device, getattr(torch, source.dtype)).contiguous()


def _converted(
    plan: LoadPlan, module: torch.nn.Module, files: TensorFiles
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the library's conversions make, one conversion after another."""
    import torch

    for entry in plan.conversions:
        device, dtype = "cpu" if entry.on_host else plan.device, getattr(torch, entry.dtype)
        parts = (
            files.read(stored.file, stored.key, stored.dtype, stored.shape).to(device, dtype)
            for _, stored in entry.parts
        )
        for name, tensor in entry.run(parts, module).items():
            yield name, tensor.to(plan.device).contiguous()


def _put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    import torch

    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)


def _tie(module: torch.nn.Module, plan: LoadPlan) -> None:
    """Tie by the model's own rule, which also unties what a checkpoint stores as different."""
    if plan.library == "transformers" and module.all_tied_weights_keys:
        tied = {name for name, source in plan.sources.items() if source.kind is SourceKind.TIED}
        with PROCESS_WIDE:
            module.tie_weights(missing_keys=tied, recompute_mapping=False)


def _place_computed(module: torch.nn.Module, plan: LoadPlan, loaded: BytesReporter) -> None:
    for name, source in plan.sources.items():
        if source.kind is SourceKind.COMPUTED:
            _put(module, name, module.get_buffer(name).to(source.device))
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


def _check_complete(module: torch.nn.Module, plan: LoadPlan) -> None:
    """Whatever happened above: nothing may be left without a value or in the wrong place."""
    import torch

    tensors = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    device = torch.device(plan.device)
    elsewhere = [
        name
        for name, tensor in tensors
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index)
    ]
    assert not empty, f"{plan.component}: left without a value: {empty}"
    assert not elsewhere, f"{plan.component}: not on {plan.device}: {elsewhere}"
