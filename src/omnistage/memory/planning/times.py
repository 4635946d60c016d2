"""How long operations take: as measured on the device, else as its rates allow.

The constants were found on one H200 with the denoiser of Qwen-Image (20.4 B) in bfloat16: forward
passes at 1024x1024 took 179 ms (two rows 346), compiled 138 (269); at 512x512, where the host is
the slower one, 104 and compiled 74.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omnistage.memory.planning.facts import DeviceFacts

if TYPE_CHECKING:
    from omnistage.memory.planning.signatures import OpSignature

ATTENTION = "attention"
"""The kind of operations that attend; see `signatures.py`."""

POINTWISE_SHARE = 0.5
"""Of the rate at which a device's memory is copied, what operations reach that do little else."""

FLOAT8_GAIN = 1.8
"""Rate of matrix products in float8 over that in bfloat16; data sheets say 2. Not measured."""

FUSED_TRAFFIC = 0.5
"""Of the time of pointwise operations, what remains when blocks are compiled: neighbours become one
kernel that reads its inputs and writes its outputs once."""

COMPILED_HOST_SHARE = 0.7
"""Of what the host needs to start operations, the part that compiled blocks still need."""


COMPILED_ACTIVATIONS = 1.1
"""Highest use of memory by compiled blocks over what `fusion.py` finds: measured on an H200 with
torch 2.11, 1.05 to 1.07 for Qwen-Image at 1024x1024."""


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """`measured_s` by operation; those that are not in it take what `facts` allow. `compiled`:
    blocks are."""

    facts: DeviceFacts
    measured_s: Mapping[OpSignature, float] = field(default_factory=dict)
    compiled: bool = False

    def of(self, op: OpSignature) -> float:
        """Seconds that the device needs for one call, not compiled."""
        found = self.measured_s.get(op)
        return roofline_s(op, self.facts) if found is None else found

    def device_s(self, ops: Mapping[OpSignature, int], *, is_block: bool = True) -> float:
        """Seconds that the device needs for all of these."""
        fused = FUSED_TRAFFIC if self.compiled and is_block else 1.0
        return sum(
            count * self.of(op) * (fused if op.kind == "pointwise" else 1.0)
            for op, count in ops.items()
        )

    def host_s(self, ops: Mapping[OpSignature, int], *, is_block: bool = True) -> float:
        """Seconds that the host needs to start them, where it has to."""
        if self.facts.host_op_s == 0:
            return 0.0
        share = COMPILED_HOST_SHARE if self.compiled and is_block else 1.0
        return sum(ops.values()) * self.facts.host_op_s * share

    def measured_share(self, ops: Counter[OpSignature]) -> float:
        """Of the device's time for these, which part was measured."""
        total_s = sum(count * self.of(op) for op, count in ops.items())
        known_s = sum(count * self.of(op) for op, count in ops.items() if op in self.measured_s)
        return known_s / total_s if total_s else 0.0


def roofline_s(op: OpSignature, facts: DeviceFacts) -> float:
    """The longer of its arithmetic and its memory traffic, at the device's rates."""
    rates = facts.rates
    if not op.flops:
        return op.nbytes / (rates.memory_bytes_per_s * POINTWISE_SHARE)
    attends = op.kind == ATTENTION
    rate = rates.attention_flops_per_s if attends else rates.matmul_flops_per_s
    dtype = max(op.tensors, key=lambda one: math.prod(one.shape)).dtype
    if dtype == "float32":
        rate *= rates.float32_share
    elif dtype.startswith("float8"):
        rate *= FLOAT8_GAIN
    return max(op.flops / rate, op.nbytes / rates.memory_bytes_per_s)
