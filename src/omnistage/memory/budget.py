"""What a stage may use of each device's memory, checked against a plan before anything is loaded.

Trivial as yet: it counts weights. Activations and what else a planner knows will be added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnistage.contracts.errors import ConfigurationError
from omnistage.memory.plan import gib


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes a stage may use, by device. A device that is not listed is not limited."""

    limits_bytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, memory_budget_gib: float | None, device: str) -> MemoryBudget:
        """From a stage's configuration, where None means no limit."""
        if memory_budget_gib is None:
            return cls()
        return cls(limits_bytes={device: int(memory_budget_gib * 2**30)})

    def check(self, needed_bytes: Mapping[str, int], *, what: str) -> None:
        """Raises `ConfigurationError` with both numbers when a device's budget is too small."""
        for device, needed in needed_bytes.items():
            limit = self.limits_bytes.get(device)
            if limit is not None and needed > limit:
                raise ConfigurationError(
                    f"{what} needs {gib(needed)} for its weights on {device}, the stage's budget "
                    f"there is {gib(limit)}; raise memory_budget_gib to at least "
                    f"{needed / 2**30:.2f}, or load a smaller dtype"
                )
