"""Quantization methods by name: which there are, which are to come, what people call them."""

from __future__ import annotations

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError

METHODS = ("fp8",)
PLANNED = (
    "int8",
    "mxfp8",
    "mxfp4",
    "mxfp4_dualscale",
    "nvfp4",
    "bitsandbytes",
    "gguf",
    "autoround",
    "modelopt",
    "msmodelslim",
    "torchao",
    "compressed_tensors",
)
ALIASES = {
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
    "auto_round": "autoround",
    "inc": "autoround",
    "bnb": "bitsandbytes",
}
"""Canonical names by other ones, written as `canonical_name` writes them."""

NONE = "none"


def canonical_name(name: str) -> str:
    """Lower case, "-" as "_", aliases resolved; known or not."""
    plain = name.strip().lower().replace("-", "_")
    return ALIASES.get(plain, plain)


def resolve_method(name: str) -> str | None:
    """The canonical name of a method that exists, None for "none".

    Raises `UnsupportedCombinationError` for a method that is known and not there yet,
    `ConfigurationError` naming the nearest for any other.
    """
    method = canonical_name(name)
    if method == NONE:
        return None
    if method in METHODS:
        return method
    if method in PLANNED:
        raise UnsupportedCombinationError(
            f"quantization {name!r} is not there yet; allowed: {NONE}, {', '.join(METHODS)}"
        )
    known = (NONE, *METHODS)
    raise ConfigurationError(f"quantization {name!r} is unknown; {suggestion(method, known)}")
