"""Loads a `transformers` class as it is: a whole model, or a part of one by its keys' prefix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError
from omnistage.contracts.runtime import LoadReporter
from omnistage.memory.checkpoint import Checkpoint, read_checkpoint
from omnistage.memory.materialize import materialize
from omnistage.memory.names import with_nearest
from omnistage.memory.plan import LoadPlan
from omnistage.memory.planner import plan_tensors, resolve_dtype
from omnistage.memory.progress import Progress
from omnistage.memory.reading import TensorFiles
from omnistage.memory.skeleton import WEIGHT_STEMS, Implementations, read_config

if TYPE_CHECKING:
    import torch


def load_transformers(
    cls: type,
    folder: Path,
    *,
    config: Any = None,
    prefix: str = "",
    dtype: str = "auto",
    device: str = "cpu",
    attn_implementation: str | Mapping[str, str] | None = None,
    experts_implementation: str | None = None,
    report: LoadReporter = lambda note, fraction: None,
) -> tuple[torch.nn.Module, LoadPlan]:
    """The module, in evaluation mode, on `device`, and the plan it was loaded by: equal, tensor by
    tensor, to what `from_pretrained` builds, or to that part of it.

    `cls` is a model class of transformers; `config` (its own: of a part the part's) replaces the
    folder's. `prefix` ("thinker.") names the part's keys: nothing else is read. `dtype` is "auto"
    (float32 on the CPU, elsewhere as most weights of the whole are stored), "float32", "bfloat16"
    or "float16". `attn_implementation` may be a mapping by the names of sub-configurations.
    `report` is told the fraction of bytes loaded. Raises `CheckpointError` naming the files or
    keys, also for keys that are missing or that `cls` has no place for.
    """
    plan = plan_transformers(
        cls,
        folder,
        config=config,
        prefix=prefix,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        experts_implementation=experts_implementation,
    )
    return load_planned(plan, report), plan


def plan_transformers(
    cls: type,
    folder: Path,
    *,
    config: Any = None,
    prefix: str = "",
    dtype: str = "auto",
    device: str = "cpu",
    attn_implementation: str | Mapping[str, str] | None = None,
    experts_implementation: str | None = None,
) -> LoadPlan:
    """As `load_transformers`, without loading: reads configurations and headers."""
    config = read_config(cls, folder) if config is None else deepcopy(config)
    whole = read_checkpoint(folder, stem=WEIGHT_STEMS["transformers"])
    return plan_tensors(
        cls,
        config,
        _part(whole, prefix),
        component=prefix.rstrip(".") or "model",
        dtype=resolve_dtype(dtype, device, [whole]),
        device=device,
        implementations=Implementations(
            attention=attn_implementation, experts=experts_implementation
        ),
        whole_type=_model_type(folder) if prefix else None,
    )


def load_planned(
    plan: LoadPlan, report: LoadReporter = lambda note, fraction: None
) -> torch.nn.Module:
    """Carry a plan out, telling `report` how far it is."""
    progress = Progress(plan.total_bytes, report)
    progress.begin(f"loading {plan.component}")
    return materialize(plan, progress.advance)


def load_tensors(
    folder: Path, keys: Iterable[str], *, dtype: str = "auto", device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Single tensors of a checkpoint by key, as they are stored but for `dtype` (as above), on
    `device`. Raises `CheckpointError` naming keys that are not there."""
    import torch

    checkpoint = read_checkpoint(folder, stem=WEIGHT_STEMS["transformers"])
    keys = list(keys)
    lacking = [key for key in keys if key not in checkpoint.tensors]
    if lacking:
        known = list(checkpoint.tensors)
        raise CheckpointError(f"{folder} has no tensor {with_nearest(lacking, known)}")
    wanted = getattr(torch, resolve_dtype(dtype, device, [checkpoint]))
    found = {}
    with TensorFiles() as files:
        for key in keys:
            stored = checkpoint.tensors[key]
            tensor = files.read(stored.file, key, stored.dtype, stored.shape)
            floating = tensor.is_floating_point()
            found[key] = tensor.to(device, wanted if floating else None).contiguous()
    return found


def _part(whole: Checkpoint, prefix: str) -> Checkpoint:
    """The tensors under a prefix, by the rest of their keys, and the files that hold them."""
    if not prefix:
        return whole
    tensors = {
        key.removeprefix(prefix): stored
        for key, stored in whole.tensors.items()
        if key.startswith(prefix)
    }
    if not tensors:
        first = sorted({key.partition(".")[0] + "." for key in whole.tensors})
        raise CheckpointError(
            f"{whole.folder} has no tensors under {prefix!r}; there are {', '.join(first)}"
        )
    files = tuple(dict.fromkeys(stored.file for stored in tensors.values()))
    return replace(whole, files=files, tensors=tensors)


def _model_type(folder: Path) -> str | None:
    model_type = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    return model_type if isinstance(model_type, str) else None
