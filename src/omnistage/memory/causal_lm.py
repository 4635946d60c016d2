"""Any causal language model that transformers has a class for, from a folder or a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError, UnsupportedCombinationError
from omnistage.contracts.runtime import LoadReporter
from omnistage.memory.fit import dtype_name
from omnistage.memory.plan import LoadPlan, Skeleton, SourceKind, TensorSource
from omnistage.memory.planner import computed_buffers, resolve_dtype
from omnistage.memory.skeleton import Implementations, read_config
from omnistage.memory.transformers_loader import load_planned, plan_transformers

if TYPE_CHECKING:
    import torch


def load_causal_lm(
    model_path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attn_implementation: str | Mapping[str, str] | None = None,
    experts_implementation: str | None = None,
    report: LoadReporter = lambda note, fraction: None,
) -> tuple[torch.nn.Module, LoadPlan]:
    """The module and the plan it was loaded by. `model_path` is a folder or a GGUF file, whose
    tensors are dequantized; the rest is as for `load_transformers`."""
    plan = plan_causal_lm(
        model_path,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        experts_implementation=experts_implementation,
    )
    return load_planned(plan, report), plan


def plan_causal_lm(
    model_path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attn_implementation: str | Mapping[str, str] | None = None,
    experts_implementation: str | None = None,
) -> LoadPlan:
    """As `load_causal_lm`, without loading: reads configurations and headers."""
    if model_path.is_file():
        implementations = Implementations(
            attention=attn_implementation, experts=experts_implementation
        )
        return _plan_gguf(model_path, dtype, device, implementations)
    config = read_config(_base_class(), model_path)
    return plan_transformers(
        causal_lm_class(config, model_path),
        model_path,
        config=config,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        experts_implementation=experts_implementation,
    )


def causal_lm_class(config: Any, where: Path) -> type:
    """The class that the configuration names, or that `AutoModelForCausalLM` has for it.

    Raises `UnsupportedCombinationError` when transformers has none.
    """
    import transformers

    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, _base_class()):
            return cls
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        found: type = mapping[type(config)]
        return found
    raise UnsupportedCombinationError(
        f"{where} is a {config.model_type}, for which transformers {transformers.__version__} has "
        "no causal language model"
    )


def _base_class() -> type:
    from transformers import PreTrainedModel

    return PreTrainedModel


def _plan_gguf(file: Path, dtype: str, device: str, implementations: Implementations) -> LoadPlan:
    config = _gguf_config(file)
    dtype = _gguf_dtype(file, dtype, device)
    cls = causal_lm_class(config, file)
    skeleton = Skeleton(cls, config, file.parent, dtype, implementations)
    module = skeleton.look()
    tied = module.all_tied_weights_keys or {}
    sources = {
        name: TensorSource(
            kind=SourceKind.TIED if name in tied else SourceKind.LIBRARY,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            device=device,
            tied_to=tied.get(name),
        )
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    return LoadPlan(
        component="model",
        cls=type(module),
        library="transformers",
        folder=file.parent,
        device=device,
        dtype=dtype,
        sources=sources | computed_buffers(module, sources, device),
        gguf_file=file,
        skeleton=skeleton,
    )


def _gguf_config(file: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # the file is the user's: what the library raises for it varies
        raise CheckpointError(f"{file} cannot be read as a GGUF model: {error}") from error


def _gguf_dtype(file: Path, dtype: str, device: str) -> str:
    """On a GPU "auto" is the dtype that most weights are stored in, bfloat16 where these are
    quantized."""
    if dtype != "auto" or device == "cpu":
        return resolve_dtype(dtype, device, ())
    from gguf import GGUFReader

    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    stored: Counter[str] = Counter()
    for tensor in GGUFReader(file).tensors:
        stored[plain.get(tensor.tensor_type.name, "bfloat16")] += int(tensor.n_bytes)
    return stored.most_common(1)[0][0]
