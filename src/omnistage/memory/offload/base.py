"""Who moves weights between host and device while a pipeline runs."""

from __future__ import annotations

from typing import Any, Protocol

from omnistage.contracts.errors import ConfigurationError
from omnistage.memory.names import nearest

STRATEGIES = ("none", "model", "layerwise", "distributed-layerwise")


class OffloadBackend(Protocol):
    """Owns the hooks of one pipeline. Exactly one backend may own a pipeline's hooks.

    Made with all that it needs (`memory.offload.factory.make_backend`), it touches the pipeline
    only in between `enable` and `disable`.
    """

    name: str

    def enable(self, pipeline: Any) -> None:
        """Take the pipeline over. Validates before it touches anything: after an error the
        pipeline is as it was. Raises `ConfigurationError` for a pipeline that has an owner, and
        `UnsupportedCombinationError` for one that the strategy cannot serve."""

    def disable(self) -> None:
        """Undo exactly what `enable` did, placement of weights included, and free what it took:
        slots, page locks, mappings. Waits for copies under way. Idempotent."""

    @property
    def is_enabled(self) -> bool: ...

    def describe(self) -> dict[str, Any]:
        """For logs and a replica's metadata: "strategy", and by strategy what is where."""


def check_strategy(name: str) -> str:
    """Raises `ConfigurationError` naming the nearest strategy for any that is unknown."""
    if name in STRATEGIES:
        return name
    near = nearest(name, STRATEGIES)
    hint = f"; nearest: {near}" if near else ""
    raise ConfigurationError(f"offload {name!r} is unknown; known: {', '.join(STRATEGIES)}{hint}")
