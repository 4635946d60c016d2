"""Offload of one stage's pipeline: what is refused before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.offload.sharding import check_sharing
from omnistage.platforms.registry import platform_of

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage

_NOTHING_MOVES = ("auto", "none")


def check_offload(stage: ResolvedStage) -> None:
    """Raises `UnsupportedCombinationError` where a strategy was chosen that the stage's devices
    have no use for."""
    check_sharing(stage)
    if stage.offload in _NOTHING_MOVES:
        return
    for device in stage.devices:
        reason = platform_of(device).offload_unavailable_reason()
        if reason is not None:
            raise UnsupportedCombinationError(
                f"offload {stage.offload!r} on {device}: {reason}; leave it out, or use a GPU "
                "(--device cuda)",
                param="offload",
            )
