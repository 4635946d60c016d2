"""Who moves weights between devices while a pipeline runs. The seam; only "none" exists as yet."""

from __future__ import annotations

from typing import Any, Protocol

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.memory.names import nearest

STRATEGIES = ("none", "model", "layerwise", "distributed-layerwise")


class OffloadBackend(Protocol):
    """Owns the hooks of one pipeline. Exactly one backend may own a pipeline's hooks."""

    name: str

    def enable(self, pipeline: Any) -> None:
        """Take the pipeline over. Validates before it touches anything."""

    def disable(self) -> None:
        """Undo exactly what `enable` did. Idempotent."""

    @property
    def is_enabled(self) -> bool: ...


class NoOffload:
    """All weights stay where the plan put them."""

    name = "none"

    def __init__(self) -> None:
        self._pipeline: Any = None

    def enable(self, pipeline: Any) -> None:
        if self._pipeline is not None:
            raise ConfigurationError(
                "this offload backend owns a pipeline already; disable it first"
            )
        self._pipeline = pipeline

    def disable(self) -> None:
        self._pipeline = None

    @property
    def is_enabled(self) -> bool:
        return self._pipeline is not None


def resolve_offload(name: str) -> OffloadBackend:
    """The backend of that name. Raises `UnsupportedCombinationError` for one that is known and not
    there yet, `ConfigurationError` for any other."""
    if name == NoOffload.name:
        return NoOffload()
    if name in STRATEGIES:
        raise UnsupportedCombinationError(
            f"offload {name!r} is not there yet; allowed: none (all weights stay on the device)"
        )
    near = nearest(name, STRATEGIES)
    hint = f"; nearest: {near}" if near else ""
    raise ConfigurationError(f"offload {name!r} is unknown; known: {', '.join(STRATEGIES)}{hint}")
