"""What the planner decides for one pipeline, before anything is loaded: where weights wait, and how
they get to the device. Loader and offload strategies carry it out; neither decides again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from omnistage.memory.offload.host import HostBacking


class Residency(StrEnum):
    """Of one component."""

    RESIDENT = "resident"
    """On the device, always."""
    SWAPPED = "swapped"
    """On the device while its group runs, on the host otherwise (model-level offload)."""
    STREAMED = "streamed"
    """Some blocks are copied in for each pass; everything else of it is resident."""


@dataclass(frozen=True, kw_only=True)
class ComponentPlacement:
    """`streamed_blocks` are paths of modules, in execution order; blocks that are not among them
    are resident. `block_bytes` is the size of the largest image."""

    component: str
    residency: Residency
    weight_bytes: int
    streamed_blocks: tuple[str, ...] = ()
    streamed_bytes: int = 0
    block_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Peaks are of one rank, in bytes, weights included; `host_bytes` is the stage's own memory,
    `locked_bytes` what is page-locked of it and of mapped files. `step_s` is one denoising step of
    the planned shape (both guidance branches); None where nobody could say."""

    device_peak_bytes: int
    host_bytes: int
    locked_bytes: int
    step_s: float | None = None
    phases_bytes: Mapping[str, int] = field(default_factory=dict)
    """Device peak by phase: "encode", "denoise", "decode"."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`strategy` is a name of `STRATEGIES`. `reasons` say, for people, why it is so; the first
    line is the decision itself."""

    strategy: str
    components: Mapping[str, ComponentPlacement]
    backing: HostBacking = HostBacking.CHECKPOINT
    page_lock_limit_bytes: int | None = None
    """None: no limit; 0: nothing is page-locked, copies are staged."""
    prediction: Prediction | None = None
    reasons: tuple[str, ...] = ()

    def of(self, component: str) -> ComponentPlacement | None:
        return self.components.get(component)

    @property
    def streams(self) -> bool:
        return any(one.streamed_blocks for one in self.components.values())
