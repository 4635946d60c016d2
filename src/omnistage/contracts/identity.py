"""Who a message is about: request → child → output, with deadline, priority and trace."""

from __future__ import annotations

import time
import uuid

import msgspec

RequestKey = tuple[str, int]
"""`(request_id, child_index)`: what a replica tracks a request by."""


class RequestIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stable across every hop, retry, partial output, cancellation and error.

    `child_index` numbers the children of one request (`n`, guidance companions) and `role` says
    what a child is for; `deadline_unix_s` is wall-clock so that it holds on another host.
    """

    request_id: str
    child_index: int = 0
    role: str = "main"
    priority: int = 0
    deadline_unix_s: float | None = None
    trace_context: str | None = None
    """A W3C `traceparent` value."""

    @property
    def key(self) -> RequestKey:
        return (self.request_id, self.child_index)

    def child(self, index: int, role: str = "main") -> RequestIdentity:
        return msgspec.structs.replace(self, child_index=index, role=role)

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never negative; None without one."""
        if self.deadline_unix_s is None:
            return None
        return max(0.0, self.deadline_unix_s - time.time())

    def __str__(self) -> str:
        return f"{self.request_id}#{self.child_index}" if self.child_index else self.request_id


def new_request_id(prefix: str = "req") -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
