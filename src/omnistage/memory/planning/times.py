"""How long operations take: as measured on the device, else as its rates allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from omnistage.memory.planning.facts import DeviceFacts
from omnistage.memory.planning.signatures import ATTENTION, OpSignature

FUSED_TRAFFIC = 0.5
"""Of the memory traffic of pointwise operations, what remains when blocks are compiled: neighbours
become one kernel that reads its inputs and writes its outputs once. To be calibrated."""


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """`measured_s` by operation; those that are not in it take what `facts` allow. `compiled`:
    blocks are."""

    facts: DeviceFacts
    measured_s: Mapping[OpSignature, float] = field(default_factory=dict)
    compiled: bool = False

    def of(self, op: OpSignature) -> float:
        """Seconds of one call, not compiled."""
        found = self.measured_s.get(op)
        return max(roofline_s(op, self.facts) if found is None else found, self.facts.launch_s)

    def of_block(self, ops: Mapping[OpSignature, int], *, is_block: bool = True) -> float:
        """Seconds of all of these."""
        total_s = 0.0
        for op, count in ops.items():
            if self.compiled and is_block and op.kind == "pointwise":
                found = self.measured_s.get(op)
                one_s = roofline_s(op, self.facts) if found is None else found
                total_s += count * one_s * FUSED_TRAFFIC
            else:
                total_s += count * self.of(op)
        return total_s

    def measured_share(self, ops: Counter[OpSignature]) -> float:
        """Of the time of these, which part was measured."""
        total_s = sum(count * self.of(op) for op, count in ops.items())
        known_s = sum(count * self.of(op) for op, count in ops.items() if op in self.measured_s)
        return known_s / total_s if total_s else 0.0


def roofline_s(op: OpSignature, facts: DeviceFacts) -> float:
    """The longer of its arithmetic and its memory traffic, at the device's rates."""
    rates = facts.rates
    traffic_s = op.nbytes / rates.memory_bytes_per_s
    if not op.flops:
        return traffic_s
    attends = op.kind == ATTENTION
    rate = rates.attention_flops_per_s if attends else rates.matmul_flops_per_s
    if any(one.dtype == "float32" for one in op.tensors):
        rate *= rates.float32_share
    return max(op.flops / rate, traffic_s)
