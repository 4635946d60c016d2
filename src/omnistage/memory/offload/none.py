"""No offload: all weights stay where they were loaded."""

from __future__ import annotations

from typing import Any

from omnistage.contracts.errors import ConfigurationError


class NoOffload:
    """See `OffloadBackend`."""

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

    def describe(self) -> dict[str, Any]:
        return {"strategy": self.name}
