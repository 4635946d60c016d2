"""Quantization methods by name. The seam; none is there yet."""

from __future__ import annotations

from typing import NoReturn, Protocol

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError

PLANNED = ("fp8", "int8", "mxfp8", "mxfp4", "bitsandbytes", "gguf")


class QuantizationMethod(Protocol):
    """How weights of one precision are loaded and multiplied."""

    name: str


def resolve_quantization(requested: str | None) -> QuantizationMethod | None:
    """None (full precision) for None and "none". Never another precision than the one asked for:

    raises `UnsupportedCombinationError` for a method that is known and not there yet,
    `ConfigurationError` for any other.
    """
    if requested is None or requested == "none":
        return None
    _refuse(requested)


def _refuse(requested: str) -> NoReturn:
    if requested in PLANNED:
        raise UnsupportedCombinationError(
            f"quantization {requested!r} is not there yet; leave it out to load full precision"
        )
    raise ConfigurationError(
        f"quantization {requested!r} is unknown; known: none, {', '.join(PLANNED)}"
    )
