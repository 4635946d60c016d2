"""Process groups of a replica: what one rank needs to talk to the others without the leader."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from omnistage.contracts.errors import InternalError, UnsupportedCombinationError
from omnistage.parallel.failures import is_collective_fault, lost_rank
from omnistage.parallel.overlays import OVERLAYS, flag
from omnistage.parallel.rendezvous import connect
from omnistage.parallel.topology import DIMENSIONS, Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WORLD = "world"
"""The name of the group of all ranks of a replica."""
COLLECTIVE_DIMENSIONS = ("data", "sequence")
"""Those whose groups can be opened."""
_BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(kw_only=True)
class ProcessGroups:
    """The groups that hold this rank. A group takes tensors on the rank's device (NCCL on a GPU)
    and on the CPU (gloo); every collective in it ends by its deadline, with an error that
    `is_collective_fault` knows. A replica of one rank has none.

    They are made of torch's default world, of which a process has one: see `open_process_groups`.
    """

    topology: Topology
    rank: int
    device: str = "cpu"
    timeout_s: float = 0.0
    """Deadline of every collective."""
    join_timeout_s: float = 0.0
    """The same while the replica loads."""
    _groups: dict[str, ProcessGroup] = field(default_factory=dict)
    _control: dict[str, ProcessGroup] = field(default_factory=dict)
    _apart: dict[str, tuple[ProcessGroup, ProcessGroup]] = field(default_factory=dict)

    def size(self, name: str) -> int:
        """Number of members of the group of dimension or overlay `name`, or of "world"."""
        return self.topology.world_size if name == WORLD else self.topology.size(name)

    def members(self, name: str) -> list[int]:
        """The ranks in this rank's group, in the order of their places in it."""
        if name == WORLD:
            return list(range(self.topology.world_size))
        return self.topology.group_of(name, self.rank)

    def rank_in(self, name: str) -> int:
        """This rank's place in its group, from 0."""
        return self.members(name).index(self.rank)

    def group_of(self, name: str) -> ProcessGroup:
        """Raises `InternalError` where this rank is alone, or after `close`."""
        group = self._groups.get(name)
        if group is None:
            raise InternalError(
                f"rank {self.rank} has no group {name!r}: it is alone in it, or has left it"
            )
        return group

    def control_group_of(self, name: str) -> ProcessGroup:
        """The same members in a gloo group of its own, for words about the work (`Agreement`) that
        must not get between the collectives of the work. Raises as `group_of`."""
        self.group_of(name)
        return self._control[name]

    def group_apart(self, name: str) -> tuple[ProcessGroup, ProcessGroup]:
        """The members of `name` once more, as `group_of` and as `control_group_of`, for whoever
        talks at times of its own: neither waits in line with the collectives of the work. Made by
        the first call, in which all ranks of the replica take part. Their deadline is that of
        loading, until `set_deadline`. Raises as `group_of`."""
        self.group_of(name)
        if name not in self._apart:
            for members in self.topology.groups(name):
                made = _made(members, timedelta(seconds=self.join_timeout_s))
                if self.rank in members:
                    self._apart[name] = made
        return self._apart[name]

    def close(self) -> None:
        """Leave all groups, without waiting for others. Idempotent."""
        if not self._groups:
            return
        import torch.distributed as dist

        self._groups.clear()
        self._control.clear()
        self._apart.clear()
        if self.device != "cpu":
            dist.distributed_c10d._abort_process_group()  # `destroy` waits for the other ranks.
        else:
            dist.destroy_process_group()


def refuse_missing(topology: Topology) -> None:
    """Raises `UnsupportedCombinationError` naming the flag of a dimension whose ranks cannot work
    together yet."""
    known = ("rank", *COLLECTIVE_DIMENSIONS)
    for name in (*DIMENSIONS, *OVERLAYS):
        size = topology.size(name)
        if size > 1 and name not in known and topology.world_size > 1:
            raise UnsupportedCombinationError(f"{flag(name)} {size} is not there yet; allowed: 1")


def open_process_groups(
    topology: Topology,
    rank: int,
    *,
    device: str,
    rendezvous: str | None,
    timeout_s: float,
    join_timeout_s: float | None = None,
) -> ProcessGroups:
    """Join the groups of this rank; all ranks of the replica must do so within `join_timeout_s`
    (None: `timeout_s`). `timeout_s` is the deadline of every later collective.

    A rank that needs no collectives joins none and touches no state of `torch.distributed`. Else
    torch's default world becomes this replica's, since its device meshes and functional collectives
    find groups through that only: a second such stage in one process is refused. `rendezvous` is
    the address of the leader's `Rendezvous`.

    Raises `UnsupportedCombinationError` naming the flag of a dimension that is not there yet, and
    `StageLostError` when another rank does not come.
    """
    topology.coordinates(rank)
    refuse_missing(topology)
    join_timeout_s = join_timeout_s or timeout_s
    groups = ProcessGroups(
        topology=topology,
        rank=rank,
        device=device,
        timeout_s=timeout_s,
        join_timeout_s=join_timeout_s,
    )
    if not topology.needs_collectives:
        return groups
    import torch.distributed as dist

    if dist.is_initialized():
        raise UnsupportedCombinationError(
            "two stages of several ranks cannot share one process; give each its own "
            "(process: separate)"
        )
    if rendezvous is None:
        raise InternalError(f"rank {rank} was told of no rendezvous")
    try:
        _join(groups, rendezvous, join_timeout_s)
        for group in (*groups._groups.values(), *groups._control.values()):
            set_deadline(group, timeout_s)
    except Exception as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        if is_collective_fault(error):
            raise lost_rank(error) from error
        raise
    return groups


def set_deadline(group: ProcessGroup, timeout_s: float) -> None:
    """For all collectives from now on, on every device of the group."""
    import torch.distributed as dist

    known = getattr(dist, "set_timeout", None)  # Newer than torch 2.11, which has this one:
    (known or dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=timeout_s), group)


def _join(groups: ProcessGroups, rendezvous: str, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    topology, timeout = groups.topology, timedelta(seconds=timeout_s)
    device = torch.device(groups.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend=_BACKENDS[device.type],
        store=connect(rendezvous, timeout_s),
        rank=groups.rank,
        world_size=topology.world_size,
        timeout=timeout,
    )
    world = dist.group.WORLD
    assert world is not None
    groups._groups[WORLD] = world
    groups._control[WORLD] = dist.new_group(backend="gloo", timeout=timeout)
    for name in COLLECTIVE_DIMENSIONS:
        if topology.size(name) == topology.world_size:
            groups._groups[name], groups._control[name] = world, groups._control[WORLD]
        elif topology.size(name) > 1:
            for members in topology.groups(name):  # Every rank makes all of them, in one order.
                group, control = _made(members, timeout)
                if groups.rank in members:
                    groups._groups[name], groups._control[name] = group, control


def _made(members: list[int], timeout: timedelta) -> tuple[ProcessGroup, ProcessGroup]:
    import torch.distributed as dist

    group = dist.new_group(members, timeout=timeout)
    return group, dist.new_group(members, backend="gloo", timeout=timeout)
