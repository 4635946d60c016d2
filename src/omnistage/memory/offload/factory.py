"""The backend for a placement."""

from __future__ import annotations

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.offload.base import OffloadBackend, check_strategy
from omnistage.memory.offload.none import NoOffload


def resolve_offload(name: str) -> OffloadBackend:
    """The backend of that name. Raises `UnsupportedCombinationError` for one that is known and not
    there yet, `ConfigurationError` for any other."""
    if name in ("auto", NoOffload.name):
        return NoOffload()
    raise UnsupportedCombinationError(
        f"offload {check_strategy(name)!r} is not there yet; allowed: none (all weights stay on "
        "the device)"
    )
