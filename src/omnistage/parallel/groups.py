"""Process groups of a replica. The seam; ranks that need collectives are not there yet."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.parallel.topology import Topology, flag

_WITHOUT_COLLECTIVES = "rank"  # such ranks talk through their leader only


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """What one rank needs to talk to the others of its groups: nothing, where no dimension needs
    collectives."""

    topology: Topology
    rank: int

    def close(self) -> None:
        """Leave all groups. Idempotent."""


def open_process_groups(topology: Topology, rank: int) -> ProcessGroups:
    """Join the groups of this rank. One rank joins none and never touches a process group.

    Raises `UnsupportedCombinationError` naming the flag of a dimension that is not there yet.
    """
    topology.coordinates(rank)
    for name, size in topology.sizes.items():
        if size > 1 and name != _WITHOUT_COLLECTIVES:
            raise UnsupportedCombinationError(f"{flag(name)} {size} is not there yet; allowed: 1")
    return ProcessGroups(topology=topology, rank=rank)
