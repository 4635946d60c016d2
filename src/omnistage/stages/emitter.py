"""Outgoing side of a replica: emissions become messages, with sequence numbers and credits.

A payload's memory belongs to this side until its output is acknowledged or its child is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import Failed, Message, Output
from omnistage.contracts.runtime import Emission
from omnistage.transport.base import Connector


class MessageSink(Protocol):
    """Takes messages for the engine from any thread; never blocks."""

    def __call__(self, message: Message, frames: Sequence[Any] = ()) -> None: ...


@dataclass(slots=True)
class _Child:
    credits: int
    next_sequence: int = 0
    ended: bool = False
    handles: dict[int, str | None] = field(default_factory=dict)


class Emitter:
    """Used by the replica's executing thread only."""

    def __init__(
        self,
        stage_id: int,
        replica_id: int,
        connector: Connector,
        send: MessageSink,
        on_credits: Callable[[RequestKey, int], None],
    ) -> None:
        self._address = {"stage_id": stage_id, "replica_id": replica_id}
        self._connector = connector
        self._send = send
        self._on_credits = on_credits
        self._children: dict[RequestKey, _Child] = {}

    def open(self, identity: RequestIdentity, credits: int) -> None:
        self._children[identity.key] = _Child(credits)
        self._on_credits(identity.key, credits)

    def is_open(self, key: RequestKey) -> bool:
        child = self._children.get(key)
        return child is not None and not child.ended

    @property
    def num_children(self) -> int:
        return len(self._children)

    def emit(self, emission: Emission) -> bool:
        """Send one emission; True when it ends its child at this stage.

        Raises `OmniError` when its data cannot travel; the child is open as before then.
        """
        child = self._children[emission.identity.key]
        assert not child.ended, f"an emission for {emission.identity} after its end"
        if emission.error is not None:
            self._send(
                Failed(
                    identity=emission.identity, error=emission.error.to_record(), **self._address
                )
            )
            self.forget(emission.identity.key)
            return True
        assert emission.data is not None
        started = time.monotonic()
        ref, frames = self._connector.send(emission.data)
        sequence = child.next_sequence
        child.handles[sequence] = ref.handle
        self._send(
            Output(
                identity=emission.identity,
                sequence=sequence,
                output_index=emission.output_index,
                payload=ref,
                final=emission.final,
                finish_reason=emission.finish_reason,
                timings_s=emission.timings_s,
                tx_s=time.monotonic() - started,
                **self._address,
            ),
            frames,
        )
        child.next_sequence += 1
        child.credits -= 1
        child.ended = emission.final
        if not emission.final:
            self._on_credits(emission.identity.key, child.credits)
        return emission.final

    def acknowledge(self, key: RequestKey, sequence: int) -> None:
        """Free one output's memory. Late acknowledgements of forgotten children are normal."""
        child = self._children.get(key)
        if child is None or sequence not in child.handles:
            return
        handle = child.handles.pop(sequence)
        if handle is not None:
            self._connector.release(handle)
        child.credits += 1
        if not child.ended:
            self._on_credits(key, child.credits)
        elif not child.handles:
            del self._children[key]

    def forget(self, key: RequestKey) -> None:
        """Free all outputs of a child, delivered or not."""
        child = self._children.pop(key, None)
        if child is None:
            return
        for handle in child.handles.values():
            if handle is not None:
                self._connector.release(handle)
