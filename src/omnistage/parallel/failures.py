"""Telling a fault of the talk between ranks from other errors."""

from __future__ import annotations

from omnistage.contracts.errors import StageLostError

_MARKS = ("gloo/", "Gloo ", "NCCL", "ProcessGroup", "TCPStore", "Connection closed by peer")


def is_collective_fault(error: BaseException) -> bool:
    """Whether a rank did not answer within its deadline, is gone, or the talk broke off. Gloo says
    so by a plain `RuntimeError` that names its source file."""
    if type(error).__module__.startswith("torch") and type(error).__name__.startswith("Dist"):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS)


def lost_rank(error: BaseException) -> StageLostError:
    """After a broken collective the ranks are out of step: the replica has to go."""
    return StageLostError(
        "a rank of this stage is gone or did not answer its fellows in time; please retry",
        detail=str(error),
    )
