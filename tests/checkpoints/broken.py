"""Damaged copies of a checkpoint, and one that is merely stored otherwise (`sharded`).

Every function takes a built checkpoint and a folder that does not exist yet, leaves the first as
it is and returns the second. Damage goes to the denoiser, for which `victim` names the tensor.
What a loader must say stands in each docstring; all of it before any weight is on a device.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    StateDict = dict[str, torch.Tensor]

Damage = Callable[[Path, Path], Path]


def denoiser(checkpoint: Path) -> str:
    """The denoiser's component name."""
    return "transformer" if (checkpoint / "transformer").is_dir() else "unet"


def victim(checkpoint: Path) -> str:
    """The denoiser's tensor that suffers: its first matrix or kernel in alphabetical order."""
    from safetensors import safe_open

    with safe_open(_weights(checkpoint), framework="pt") as file:
        return next(
            name for name in sorted(file.keys()) if len(file.get_slice(name).get_shape()) > 1
        )


def corrupt_safetensors(source: Path, target: Path) -> Path:
    """The header's length is nonsense. Say which file is not a safetensors file."""
    _copy(source, target)
    with _weights(target).open("r+b") as file:
        file.write(b"\xff" * 8)
    return target


def truncated_safetensors(source: Path, target: Path) -> Path:
    """As after a broken download: the last quarter is gone, and the header, intact, promises more
    bytes than there are. Say which file, how long it is and how long it should be."""
    _copy(source, target)
    weights = _weights(target)
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size * 3 // 4)
    return target


def missing_tensor(source: Path, target: Path) -> Path:
    """The victim is not in the file. Name component and tensor. Plain `diffusers` draws it at
    random and only logs that, so its pictures are wrong."""

    def drop(state: StateDict, name: str) -> None:
        del state[name]

    return _rewritten(source, target, drop)


def unexpected_tensor(source: Path, target: Path) -> Path:
    """The file holds `no_such_layer.weight` besides. Warn, naming component and tensor, and load:
    the pictures are right. Plain `diffusers` does just that."""

    def add(state: StateDict, name: str) -> None:
        state["no_such_layer.weight"] = state[name].clone()

    return _rewritten(source, target, add)


def wrong_shape(source: Path, target: Path) -> Path:
    """The victim has one row too many. Name component, tensor, its shape and the one expected."""

    def grow(state: StateDict, name: str) -> None:
        tensor = state[name]
        state[name] = tensor.new_zeros(len(tensor) + 1, *tensor.shape[1:])

    return _rewritten(source, target, grow)


def wrong_dtype(source: Path, target: Path) -> Path:
    """The victim is stored as int32. Name component, tensor, its type and those allowed. Another
    floating type than asked for is no error but a cast; plain `diffusers` casts integers too,
    and silently: fractions are lost."""

    def round_off(state: StateDict, name: str) -> None:
        state[name] = state[name].int()

    return _rewritten(source, target, round_off)


def unknown_pipeline_class(source: Path, target: Path) -> Path:
    """`model_index.json` asks for `NoSuchPipeline`. Name it, and the installed `diffusers`."""
    _copy(source, target)
    index = target / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "NoSuchPipeline"}))
    return target


def missing_component_folder(source: Path, target: Path) -> Path:
    """The index lists a denoiser whose folder is absent. Name the component and the folder."""
    _copy(source, target)
    shutil.rmtree(target / denoiser(target))
    return target


def not_a_pipeline(source: Path, target: Path) -> Path:
    """The denoiser's files alone, no `model_index.json`. Say that the folder is no pipeline, and
    which file would make it one."""
    shutil.copytree(source / denoiser(source), target)
    return target


def bad_index(source: Path, target: Path) -> Path:
    """The denoiser's shard index names a file that is absent. Name the index and that file."""
    sharded(source, target)
    _, second, *_ = sorted(_weights(target).parent.glob("*.safetensors"))
    second.unlink()
    return target


def sharded(source: Path, target: Path) -> Path:
    """No damage: all weights are split into about three files each, with an index. Must load equal
    to the source, bit for bit."""
    from safetensors.torch import load_file

    _copy(source, target)
    for weights in sorted(target.rglob("*.safetensors")):
        _split(weights, load_file(weights))
    return target


REFUSED: tuple[Damage, ...] = (
    corrupt_safetensors,
    truncated_safetensors,
    missing_tensor,
    wrong_shape,
    wrong_dtype,
    unknown_pipeline_class,
    missing_component_folder,
    not_a_pipeline,
    bad_index,
)
ACCEPTED: tuple[Damage, ...] = (unexpected_tensor, sharded)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def _weights(checkpoint: Path) -> Path:
    return checkpoint / denoiser(checkpoint) / "diffusion_pytorch_model.safetensors"


def _rewritten(source: Path, target: Path, change: Callable[[StateDict, str], None]) -> Path:
    """Copy, and `change(state, victim)` the denoiser's tensors."""
    from safetensors.torch import load_file, save_file

    _copy(source, target)
    weights = _weights(target)
    state = load_file(weights)
    change(state, victim(source))
    save_file(state, weights, metadata={"format": "pt"})
    return target


def _split(weights: Path, state: StateDict) -> None:
    """Replace `NAME.safetensors` by `NAME-00001-of-0000N.safetensors` and the index to them."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(
        state,
        filename_pattern=f"{weights.stem}{{suffix}}.safetensors",
        max_shard_size=weights.stat().st_size // 3,
    )
    weights.unlink()
    for filename, names in split.filename_to_tensors.items():
        shard = {name: state[name] for name in names}
        save_file(shard, weights.with_name(filename), metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    weights.with_name(f"{weights.name}.index.json").write_text(json.dumps(index, indent=2))
