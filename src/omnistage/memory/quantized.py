"""What the configuration of a checkpoint says about how its weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.quantization.registry import canonical_name

CONFIG_KEY = "quantization_config"
READABLE = ("fp8", "modelopt", "torchao", "compressed_tensors")
"""Methods whose float8 checkpoints can be of the form that `float8_layers` reads."""


def stored_quantization(config: Any) -> Mapping[str, Any] | None:
    """A component's own `quantization_config`."""
    found = (
        config.get(CONFIG_KEY) if isinstance(config, Mapping) else getattr(config, CONFIG_KEY, None)
    )
    if not found:
        return None
    return found if isinstance(found, Mapping) else found.to_dict()


def check_readable(config: Any, folder: Path) -> None:
    """Raises `UnsupportedCombinationError` for a checkpoint stored by a method that is not read."""
    stored = stored_quantization(config)
    if stored is None:
        return
    name = str(stored.get("quant_method") or stored.get("quant_algo") or stored.get("method"))
    method = canonical_name(name)
    blockwise = stored.get("weight_block_size") is not None
    if method not in READABLE or blockwise:
        how = f"{name} with scales of blocks" if blockwise else name
        raise UnsupportedCombinationError(
            f"{folder} is a quantized checkpoint of the method {how}; allowed are full precision, "
            "and float8 (E4M3) with one scale a row or one a tensor"
        )


def without_quantization(config: Any) -> Any:
    """The configuration as a class in full precision takes it; the given one is left as it is."""
    if isinstance(config, Mapping):
        return {key: value for key, value in config.items() if key != CONFIG_KEY}
    if not hasattr(config, CONFIG_KEY):
        return config
    plain = copy(config)
    delattr(plain, CONFIG_KEY)
    return plain
