"""The replicas that live in one process, addressed by (stage, replica)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from omnistage.contracts.errors import ProtocolError
from omnistage.contracts.messages import Message, ReplicaStatus
from omnistage.observability.logging import DEFAULT_LOGS, LogSettings
from omnistage.stages.emitter import MessageSink
from omnistage.stages.launch import ReplicaLaunch
from omnistage.stages.replica import Replica

Address = tuple[int, int]
"""`(stage_id, replica_id)`."""


class ReplicaHost:
    """Hosts replicas in this process, each on its own executing thread."""

    def __init__(
        self,
        launches: Sequence[ReplicaLaunch],
        send: MessageSink,
        on_rank_exit: Callable[[Replica, int, int], None],
        *,
        inline: bool = False,
        log: LogSettings = DEFAULT_LOGS,
    ) -> None:
        self._replicas: dict[Address, Replica] = {
            (launch.stage.stage_id, launch.replica_id): Replica(
                launch.stage,
                launch.replica_id,
                send,
                on_rank_exit,
                connector_kind="inline" if inline else launch.stage.connector,
                log=log,
            )
            for launch in launches
        }

    def start(self) -> None:
        for replica in self._replicas.values():
            replica.start()

    def deliver(self, message: Message, frames: Sequence[Any] = ()) -> None:
        """Hand a message to the replica it names; one that names none goes to all."""
        if message.stage_id == -1:
            for replica in self._replicas.values():
                replica.deliver(message, frames)
            return
        replica = self._replicas.get((message.stage_id, message.replica_id))
        if replica is None:
            raise ProtocolError(
                f"no replica {message.replica_id} of stage {message.stage_id} in this process"
            )
        replica.deliver(message, frames)

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        return tuple(replica.status() for replica in self._replicas.values())
