"""All requests in flight: admission, lookup, and the moment when none is left."""

from __future__ import annotations

import asyncio

from omnistage.config.resolved import EngineLimits
from omnistage.contracts.errors import InvalidRequestError, OverloadedError, UnavailableError
from omnistage.engine.request_state import RequestState
from omnistage.observability.metrics import EngineMetrics

RETRY_AFTER_S = 1.0


class RequestTable:
    """Requests count until every stage has let go of them, cancelled ones too."""

    def __init__(self, limits: EngineLimits, metrics: EngineMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._requests: dict[str, RequestState] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._requests)

    def all(self) -> list[RequestState]:
        return list(self._requests.values())

    def get(self, request_id: str) -> RequestState | None:
        return self._requests.get(request_id)

    def admit(self, state: RequestState) -> None:
        """Take a request in, or refuse it at once.

        Raises `OverloadedError` at the bound, `UnavailableError` while draining,
        `InvalidRequestError` for an id that is in use.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down", retry_after_s=RETRY_AFTER_S)
        bound = self._limits.max_inflight_requests
        if len(self._requests) >= bound:
            raise OverloadedError(
                f"{len(self._requests)} requests are in flight, the limit is {bound}; "
                "retry later or raise --max-inflight-requests",
                retry_after_s=RETRY_AFTER_S,
            )
        if state.request_id in self._requests:
            raise InvalidRequestError(
                f"request id {state.request_id!r} is already in flight; ids must be unique",
                param="request_id",
            )
        self._requests[state.request_id] = state
        self._empty.clear()
        self._metrics.request_admitted()
        self.count()

    def remove(self, state: RequestState) -> bool:
        """Forget a request; False when it is gone already."""
        if self._requests.get(state.request_id) is not state:
            return False
        del self._requests[state.request_id]
        self.count()
        if not self._requests:
            self._empty.set()
        return True

    def count(self) -> None:
        """Tell the metrics how many run and how many wait for a replica."""
        waiting = sum(
            any(child.waiting for child in state.children.values())
            for state in self._requests.values()
        )
        self._metrics.request_running(len(self._requests) - waiting)
        self._metrics.request_waiting(waiting)

    async def wait_empty(self, timeout_s: float) -> bool:
        """False when some request is still here after `timeout_s`."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
