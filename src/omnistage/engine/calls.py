"""Control calls to replicas, matched with their answers."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from omnistage.contracts.errors import DeadlineExceededError, OmniError, from_record
from omnistage.contracts.messages import Control, ControlResult
from omnistage.stages.pool import ReplicaHandle
from omnistage.stages.supervisor import StageSupervisor


class ReplicaCalls:
    """Used on the event loop only."""

    def __init__(self, supervisor: StageSupervisor) -> None:
        self._supervisor = supervisor
        self._waiting: dict[str, tuple[ReplicaHandle, asyncio.Future[Any]]] = {}

    async def call(
        self, replica: ReplicaHandle, method: str, arguments: dict[str, Any], timeout_s: float
    ) -> Any:
        """The answer of one replica. Raises what it raised, `StageLostError` when it is lost and
        `DeadlineExceededError` when it does not answer in time."""
        call_id = uuid.uuid4().hex
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = (replica, future)
        message = Control(call_id=call_id, method=method, arguments=arguments)
        try:
            self._supervisor.send(replica, message)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise DeadlineExceededError(
                f"stage {replica.stage.name!r} did not answer {method!r} within {timeout_s:g} s; "
                "it answers between two commands"
            ) from None
        finally:
            del self._waiting[call_id]

    def answered(self, message: ControlResult) -> None:
        _, future = self._waiting.get(message.call_id, (None, None))
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(from_record(message.error))
        else:
            future.set_result(message.result)

    def fail(self, error: OmniError, replica: ReplicaHandle | None = None) -> None:
        """No answer will come from this replica, or from any."""
        for asked, future in self._waiting.values():
            if (replica is None or asked is replica) and not future.done():
                future.set_exception(error)
