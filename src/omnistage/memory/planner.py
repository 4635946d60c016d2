"""Makes the plan of one module from its class, its configuration and its files' headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError, ConfigurationError
from omnistage.memory.checkpoint import Checkpoint, StoredTensor, read_checkpoint
from omnistage.memory.conversion import Conversion, plan_conversions
from omnistage.memory.fit import dtype_name, find_problems
from omnistage.memory.float8_layers import (
    QuantizationRequest,
    find_stored_layers,
    float8_names,
    float8_skeleton,
)
from omnistage.memory.plan import LoadPlan, Skeleton, SourceKind, TensorSource
from omnistage.memory.renaming import Renaming, is_ignored, rename, wanted_float32
from omnistage.memory.skeleton import WEIGHT_STEMS, Implementations, library_of, read_config

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")


def plan_module(
    cls: type,
    folder: Path,
    *,
    config: Any = None,
    component: str = "model",
    dtype: str = "auto",
    device: str = "cpu",
    variant: str | None = None,
    allow_unexpected: bool = False,
    quantization: QuantizationRequest | None = None,
) -> LoadPlan:
    """Plan one `diffusers` or `transformers` model that lies in `folder`.

    Loads nothing. `config` replaces the folder's `config.json`; `dtype` is one of `DTYPES`, where
    "auto" means float32 on the CPU and the checkpoint's own elsewhere. `allow_unexpected` leaves
    stored tensors that the model has no place for unused, as the libraries do; the plan lists
    them. Checkpoints that store float8 are refused without `quantization`, which says how their
    layers compute. Raises `CheckpointError` naming the file or keys.
    """
    if config is None:
        config = read_config(cls, folder, quantized=quantization is not None)
    checkpoint = component_checkpoint(cls, folder, variant)
    dtype = resolve_dtype(dtype, device, [checkpoint])
    return plan_tensors(
        cls,
        config,
        checkpoint,
        component=component,
        dtype=dtype,
        device=device,
        allow_unexpected=allow_unexpected,
        quantization=quantization,
    )


def component_checkpoint(cls: type, folder: Path, variant: str | None = None) -> Checkpoint:
    """The headers of the files that this class's own loader would take from `folder`."""
    library = library_of(cls)
    if library is None:
        raise CheckpointError(f"{cls.__name__} is no model class of diffusers or transformers")
    return read_checkpoint(
        folder,
        stem=WEIGHT_STEMS[library],
        variant=variant,
        index_first=library == "diffusers",
    )


def resolve_dtype(requested: str, device: str, checkpoints: Iterable[Checkpoint]) -> str:
    """`requested`, or for "auto" float32 on the CPU and elsewhere the floating dtype that most
    stored bytes have: one for all, as models of one pipeline hand tensors to each other."""
    if requested not in DTYPES:
        raise ConfigurationError(f"dtype {requested!r} is unknown; allowed: {', '.join(DTYPES)}")
    if requested != "auto":
        return requested
    if device == "cpu":
        return "float32"
    stored: Counter[str] = Counter()
    for checkpoint in checkpoints:
        for tensor in checkpoint.tensors.values():
            if tensor.dtype in DTYPES:
                stored[tensor.dtype] += tensor.nbytes
    return stored.most_common(1)[0][0] if stored else "float32"


def plan_tensors(
    cls: type,
    config: Any,
    checkpoint: Checkpoint,
    *,
    component: str,
    dtype: str,
    device: str,
    allow_unexpected: bool = False,
    implementations: Implementations | None = None,
    whole_type: str | None = None,
    quantization: QuantizationRequest | None = None,
) -> LoadPlan:
    """Match a skeleton of `cls` with a checkpoint, name by name. `dtype` is a resolved one,
    `whole_type` the `model_type` of the model that `cls` is a part of.

    Raises `CheckpointError` naming missing keys, unexpected keys, and shapes and dtypes that
    differ, and as `float8_skeleton` does for quantized checkpoints.
    """
    skeleton = Skeleton(cls, config, checkpoint.folder, dtype, implementations)
    float8 = find_stored_layers(config, checkpoint) if quantization is not None else None
    if float8 is not None and quantization is not None:
        checkpoint = float8.checkpoint
        skeleton = float8_skeleton(
            skeleton, float8, component=component, request=quantization, whole_type=whole_type
        )
    module = skeleton.look()
    renaming = rename(
        module, checkpoint.tensors, sharded=len(checkpoint.files) > 1, whole_type=whole_type
    )
    state = module.state_dict(keep_vars=True)
    stored, unused = _match(module, state, renaming.names, checkpoint, allow_unexpected)
    made, conversions = _converted(module, state, renaming, checkpoint, dtype, device)
    sources = _sources(module, state, stored, dtype, device, made)
    problems = find_problems(state, stored, sources)
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} does not fit {component} ({type(module).__name__}): "
            f"{'; '.join(problems)}"
        )
    return LoadPlan(
        component=component,
        cls=type(module),
        library=str(library_of(cls)),
        folder=checkpoint.folder,
        device=device,
        dtype=dtype,
        sources=sources,
        variant=checkpoint.variant,
        unused_keys=unused + (float8.unused_keys if float8 is not None else ()),
        conversions=conversions,
        skeleton=skeleton,
    )


def _converted(
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    renaming: Renaming,
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
) -> tuple[Mapping[str, TensorSource], tuple[Conversion, ...]]:
    """Sources of the names that the library's conversions make, and these conversions."""
    float32 = wanted_float32(module, renaming.converted, dtype) if renaming.converted else ()
    dtypes = {
        name: "float32" if name in float32 else dtype_name(state[name].dtype)
        for name in renaming.converted
    }
    sources: dict[str, TensorSource] = {}
    conversions = []
    for conversion, shapes in plan_conversions(
        module, state, renaming.converted, checkpoint.tensors, dtypes
    ):
        conversions.append(conversion)
        for name, shape in shapes.items():
            sources[name] = TensorSource(
                kind=SourceKind.CONVERTED, shape=shape, dtype=conversion.dtype, device=device
            )
    return sources, tuple(conversions)


def _match(
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
    checkpoint: Checkpoint,
    allow_unexpected: bool,
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The stored tensor of each name (also of unknown names), and the keys to leave unused."""
    stored: dict[str, StoredTensor] = {}
    unused = []
    for key, name in names.items():
        if name not in state and (allow_unexpected or is_ignored(module, name)):
            unused.append(key)
        elif name in stored:
            raise CheckpointError(
                f"{checkpoint.folder}: {stored[name].key!r} and {key!r} are both {name!r} of a "
                f"{type(module).__name__}"
            )
        else:
            stored[name] = checkpoint.tensors[key]
    return stored, tuple(unused)


def _sources(
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredTensor],
    dtype: str,
    device: str,
    made: Mapping[str, TensorSource],
) -> dict[str, TensorSource]:
    """Sources of all names but those that nothing provides, with those `made` by conversions."""
    present = {name: stored[name] for name in state if name in stored}
    float32 = wanted_float32(module, present, dtype)
    diffusers = library_of(type(module)) == "diffusers"
    own = float8_names(module)
    sources = dict(made)
    for name, tensor in present.items():
        wanted = dtype_name(state[name].dtype)
        if name in own:
            pass
        elif name in float32:
            wanted = "float32"
        elif diffusers and "float" in tensor.dtype:
            wanted = dtype  # diffusers casts whatever dtype the parameter was made with
        sources[name] = TensorSource(
            kind=SourceKind.CHECKPOINT,
            shape=tensor.shape,
            dtype=wanted,
            device=device,
            file=tensor.file,
            key=tensor.key,
            offset_bytes=tensor.offset_bytes,
            stored_dtype=tensor.dtype,
        )
    for name, owner in _ties(module, state, sources).items():
        sources[name] = TensorSource(
            kind=SourceKind.TIED,
            shape=sources[owner].shape,
            dtype=sources[owner].dtype,
            device=device,
            tied_to=owner,
        )
    return sources | computed_buffers(module, state, device)


def _ties(
    module: torch.nn.Module, state: Mapping[str, torch.Tensor], present: Collection[str]
) -> dict[str, str]:
    """For names without a stored tensor, the name whose tensor they share: because one module has
    both names, or because the model's class ties them."""
    owners = {id(state[name]): name for name in present}
    ties = {
        name: owners[id(tensor)]
        for name, tensor in state.items()
        if name not in present and id(tensor) in owners
    }
    declared = getattr(module, "all_tied_weights_keys", None) or {}
    for target, source in declared.items():
        group = {source, *(other for other, to in declared.items() if to == source)}
        owner = next((name for name in sorted(group) if name in present), None)
        if owner is not None:
            ties |= {name: owner for name in (target, source) if name not in present}
    return ties


def computed_buffers(
    module: torch.nn.Module, state: Collection[str], device: str
) -> dict[str, TensorSource]:
    """Sources of the buffers that no checkpoint holds: those whose names are not in `state`."""
    return {
        name: TensorSource(
            kind=SourceKind.COMPUTED,
            shape=tuple(buffer.shape),
            dtype=dtype_name(buffer.dtype),
            device=device,
        )
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if name not in state
    }
