"""What the components of a pipeline do for one request: memory and time, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("encode", "denoise", "decode")

PHASE_OF_PART = {"encoders": "encode", "denoisers": "denoise", "autoencoders": "decode"}


@dataclass(frozen=True, kw_only=True)
class ComponentWork:
    """Of one pass of a component. `activation_bytes` is the highest use of the device besides
    weights; `block_s` by path of block, `rest_s` outside of blocks;
    `captured_s` is a pass replayed from a captured graph, where all weights are resident and that
    is done; `passes` a step, or a request
    where the component does not run in steps. `is_known` False: the class is unknown, memory is a
    stated estimate, and nobody says how long it takes."""

    component: str
    phase: str
    activation_bytes: int
    block_s: Mapping[str, float] = field(default_factory=dict)
    rest_s: float = 0.0
    captured_s: float | None = None
    passes: int = 1
    is_known: bool = True
    note: str = ""

    @property
    def compute_s(self) -> float:
        return sum(self.block_s.values()) + self.rest_s

    @property
    def resident_s(self) -> float:
        """A pass with all weights on the device."""
        return self.compute_s if self.captured_s is None else self.captured_s


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """`notes` say, for people, what predictions rest on."""

    components: Mapping[str, ComponentWork]
    steps: int
    notes: tuple[str, ...] = ()

    def activation_bytes(self, phase: str) -> int:
        return max((one.activation_bytes for one in self.of_phase(phase)), default=0)

    def of_phase(self, phase: str) -> list[ComponentWork]:
        return [one for one in self.components.values() if one.phase == phase]
