"""Skeletons for checkpoints that store float8 weights: keys become a module's, layers float8 ones.

What is stored decides: a layer is float8 where its weight is stored as float8_e4m3fn with a scale
of one number a row or one for all, under one of the spellings below; every other layer stays in
the precision it is stored in, which is how a checkpoint's own list of ignored layers is honoured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError, UnsupportedCombinationError
from omnistage.memory.checkpoint import Checkpoint, StoredTensor
from omnistage.memory.names import and_more
from omnistage.memory.plan import Skeleton
from omnistage.memory.quantized import stored_quantization, without_quantization
from omnistage.memory.renaming import rename
from omnistage.quantization.config import QuantizationPlan, check_precision

if TYPE_CHECKING:
    import torch


SPELLINGS = {
    ".scale_weight": ".weight_scale",
    "._weight_qdata": ".weight",
    "._weight_scale": ".weight_scale",
}
"""Endings of keys by what they become: ComfyUI's, and those under which torchao serializes its
float8 tensors (flattened by `torchao.prototype.safetensors`)."""

UNUSED = (".input_scale", ".scale_input", "scaled_fp8")
"""Static scales of inputs, which are scaled as they come here, and ComfyUI's marker."""

_FLOAT8 = "float8_e4m3fn"
_BLOCKWISE = "weight_scale_inv"


@dataclass(frozen=True, kw_only=True)
class QuantizationRequest:
    """What a pipeline's plan asks for, and where it will run: decides how layers compute."""

    plan: QuantizationPlan = field(default_factory=QuantizationPlan)
    device: str = "cpu"
    float8: bool = False


@dataclass(frozen=True, kw_only=True)
class StoredLayers:
    """`scale_shapes` by path of layer, `checkpoint` with its keys as a module spells them and
    without `unused_keys`."""

    checkpoint: Checkpoint
    scale_shapes: Mapping[str, tuple[int, ...]]
    unused_keys: tuple[str, ...]


def float8_skeleton(
    skeleton: Skeleton,
    stored: StoredLayers,
    *,
    component: str,
    request: QuantizationRequest,
    whole_type: str | None = None,
) -> Skeleton:
    """The same with float8 layers where the checkpoint stores them.

    Raises `CheckpointError` where there are no linear layers, and `UnsupportedCombinationError`
    where the request asks for full precision, or for compute that the device does not have.
    """
    config = without_quantization(skeleton.config)
    made = (skeleton.cls, config, skeleton.folder, skeleton.dtype, skeleton.implementations)
    shapes = _scale_shapes(Skeleton(*made).take(), stored, whole_type)
    check_precision(request.plan, component, shapes)
    install = partial(_install, scale_shapes=shapes, component=component, request=request)
    return Skeleton(*made, install)


def find_stored_layers(config: Any, checkpoint: Checkpoint) -> StoredLayers | None:
    """None for a checkpoint in full precision. Raises `CheckpointError` for one that says it is
    quantized and is not as expected."""
    respelled = {_respelled(key): tensor for key, tensor in checkpoint.tensors.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, weight in respelled.items():
        path = key.removesuffix(".weight")
        scale = respelled.get(f"{path}.weight_scale")
        if path != key and weight.dtype == _FLOAT8 and scale is not None:
            shapes[path] = _scale_shape(weight, scale)
    if stored_quantization(config) is not None and not shapes:
        blockwise = any(key.endswith(_BLOCKWISE) for key in respelled)
        raise UnsupportedCombinationError(
            f"{checkpoint.folder} is a quantized checkpoint "
            + ("with scales of blocks" if blockwise else "without float8 weights and their scales")
            + "; allowed are full precision, and float8 (E4M3) with one scale a row or a tensor"
        )
    if not shapes:
        return None
    unused = [key for key in respelled if key.endswith(UNUSED)]
    kept = {key: tensor for key, tensor in respelled.items() if key not in unused}
    return StoredLayers(
        checkpoint=replace(checkpoint, tensors=kept),
        scale_shapes=shapes,
        unused_keys=tuple(unused),
    )


def _install(
    module: torch.nn.Module,
    scale_shapes: Mapping[str, tuple[int, ...]],
    component: str,
    request: QuantizationRequest,
) -> None:
    from omnistage.quantization.convert import as_skeleton

    as_skeleton(
        module,
        scale_shapes,
        request.plan,
        component,
        device=request.device,
        float8=request.float8,
    )


def float8_names(module: torch.nn.Module) -> set[str]:
    """Names of tensors whose dtypes are the layers' own, whatever the rest is loaded as."""
    from omnistage.quantization.convert import quantized_layers

    return {
        f"{path}.{leaf}" for path in quantized_layers(module) for leaf in ("weight", "weight_scale")
    }


def _scale_shapes(
    module: torch.nn.Module, stored: StoredLayers, whole_type: str | None
) -> dict[str, tuple[int, ...]]:
    """Shapes of scales by the paths that the layers have in the module."""
    keys = [f"{path}.weight" for path in stored.scale_shapes]
    sharded = len(stored.checkpoint.files) > 1
    names = rename(module, keys, sharded=sharded, whole_type=whole_type).names
    if len(names) < len(keys):
        raise UnsupportedCombinationError(
            f"{stored.checkpoint.folder} stores in float8 what its library converts: "
            f"{and_more(key for key in keys if key not in names)}; use one in full precision"
        )
    return {
        names[key].removesuffix(".weight"): stored.scale_shapes[key.removesuffix(".weight")]
        for key in keys
    }


def _respelled(key: str) -> str:
    for ending, ours in SPELLINGS.items():
        if key.endswith(ending):
            return key.removesuffix(ending) + ours
    return key


def _scale_shape(weight: StoredTensor, scale: StoredTensor) -> tuple[int, ...]:
    rows = weight.shape[0] if weight.shape else 0
    if math.prod(scale.shape) not in (1, rows) or "float" not in scale.dtype:
        raise CheckpointError(
            f"{scale.key} is {scale.dtype} {list(scale.shape)}; for {weight.key} "
            f"{list(weight.shape)} one floating number a row or one for all is needed: "
            f"{and_more([f'[{rows}, 1]', f'[{rows}]', '[1]', '[]'])}"
        )
    return scale.shape
