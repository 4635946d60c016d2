"""Forward passes of a library's own modules without weights: what they hold, and what they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.memory.planning.signatures import OpSignature
from omnistage.memory.planning.tracking import ForwardTracker, total_ops

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ForwardProfile:
    """`peak_activation_bytes` is the highest use besides weights, inputs and results included,
    `compiled_activation_bytes` the same when blocks are compiled;
    `block_ops` by path of block, "" being all that is outside of blocks."""

    peak_activation_bytes: int
    compiled_activation_bytes: int
    block_ops: Mapping[str, Counter[OpSignature]] = field(default_factory=dict)

    @property
    def ops(self) -> Counter[OpSignature]:
        return total_ops(self.block_ops)


def profile_forward(
    module: torch.nn.Module,
    run: Callable[[torch.nn.Module, str], Any],
    *,
    device: str = "meta",
    block_paths: tuple[str, ...] = (),
) -> ForwardProfile:
    """Watch `run(module, device)`, which makes inputs on the device and calls the module.

    Works on any device; on "meta" nothing is computed. Raises whatever the module raises.
    """
    tracker = ForwardTracker(device)
    with tracker.blocks(module, block_paths), tracker.watching(module):
        result = run(module, device)
        del result
    return ForwardProfile(
        peak_activation_bytes=tracker.peak_bytes,
        compiled_activation_bytes=tracker.fused_peak_bytes,
        block_ops=tracker.ops,
    )
