"""What a stage may use of each device's memory, checked before anything is loaded.

`MemoryBudget` compares weights with it, for stages that plan no placement; `DeviceBudget` is what
a placement must stay within, activations included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnistage.contracts.errors import ConfigurationError
from omnistage.memory.plan import gib

GIB_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceBudget:
    """Bytes that one rank may have allocated on its device. `is_set` says that a person set it
    (`memory_budget_gib`); else it is what the device has free."""

    limit_bytes: int
    is_set: bool = False

    @classmethod
    def of(cls, memory_budget_gib: float | None, free_bytes: int) -> DeviceBudget:
        """A budget above what is free does not make memory: the smaller one holds."""
        if memory_budget_gib is None:
            return cls(limit_bytes=free_bytes)
        wanted_bytes = int(memory_budget_gib * GIB_BYTES)
        return cls(limit_bytes=min(wanted_bytes, free_bytes), is_set=wanted_bytes <= free_bytes)

    def __str__(self) -> str:
        return f"{gib(self.limit_bytes)} ({'memory_budget_gib' if self.is_set else 'free'})"


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes a stage may use, by device. A device that is not listed is not limited."""

    limits_bytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, memory_budget_gib: float | None, device: str) -> MemoryBudget:
        """From a stage's configuration, where None means no limit."""
        if memory_budget_gib is None:
            return cls()
        return cls(limits_bytes={device: int(memory_budget_gib * GIB_BYTES)})

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
