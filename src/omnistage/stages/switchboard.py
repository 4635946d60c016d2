"""The engine's one socket: messages to and from all replica processes.

A process is known by the token it was launched with; whoever has not said a matching `Hello` is
not listened to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from omnistage.contracts.errors import ProtocolError, StageLostError
from omnistage.contracts.messages import FromReplica, Hello, Message
from omnistage.observability.logging import get_logger
from omnistage.transport.codec import MessageDecoder, encode
from omnistage.transport.sockets import bind_privately, tokens_match

logger = get_logger(__name__)

_ZERO_COPY_BYTES = 65_536


class Line:
    """One process's entry at the switchboard. Callbacks run on the event loop."""

    def __init__(
        self,
        token: str,
        on_message: Callable[[Message, Sequence[memoryview]], None],
        on_malformed: Callable[[ProtocolError], None],
    ) -> None:
        self.token = token
        self.on_message = on_message
        self.on_malformed = on_malformed
        self.routing_id: bytes | None = None


class Switchboard:
    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address: str = bind_privately(self._socket)
        self._decoder = MessageDecoder(FromReplica)
        self._waiting: list[Line] = []
        self._connected: dict[bytes, Line] = {}
        self._task = asyncio.get_running_loop().create_task(self._receive(), name="switchboard")

    def expect(self, line: Line) -> None:
        """A process with this line's token is about to call."""
        self._waiting.append(line)

    def forget(self, line: Line) -> None:
        if line in self._waiting:
            self._waiting.remove(line)
        if line.routing_id is not None:
            self._connected.pop(line.routing_id, None)

    def send(self, line: Line, message: Message, frames: Sequence[Any] = ()) -> None:
        """Queue a message; never waits. Raises `StageLostError` when the process is gone."""
        if line.routing_id is None:
            raise StageLostError("this replica's process has not connected yet; please retry")
        parts = [line.routing_id, *encode(message, frames)]
        if self._socket.closed:
            raise StageLostError("the engine has ended")
        large = sum(map(len, parts)) >= _ZERO_COPY_BYTES
        sent = self._socket.send_multipart(parts, copy=not large)
        if sent.done() and sent.exception() is not None:
            raise StageLostError("this replica's process is gone; please retry")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart(copy=False)
            routing_id, *body = (part.buffer for part in parts)
            self._dispatch(bytes(routing_id), body)

    def _dispatch(self, routing_id: bytes, body: list[memoryview]) -> None:
        line = self._connected.get(routing_id)
        try:
            message, frames = self._decoder.decode(body)
        except ProtocolError as error:
            if line is None:
                logger.warning("a stranger sent a malformed message: %s", error)
            else:
                line.on_malformed(error)
            return
        if line is None:
            line = self._admit(routing_id, message)
        if line is not None:
            self._hand_over(line, message, frames)

    @staticmethod
    def _hand_over(line: Line, message: Message, frames: list[memoryview]) -> None:
        """A message that its receiver chokes on costs its sender, and nobody else."""
        try:
            line.on_message(message, frames)
        except Exception as error:
            logger.exception("a %s could not be handled", type(message).__name__)
            line.on_malformed(ProtocolError(f"{type(message).__name__}: {error}"))

    def _admit(self, routing_id: bytes, message: Message) -> Line | None:
        if not isinstance(message, Hello):
            return None  # Last words of a process that was given up.
        for line in self._waiting:
            if tokens_match(line.token, message.token):
                self._waiting.remove(line)
                line.routing_id = routing_id
                self._connected[routing_id] = line
                return line
        logger.warning("a process with an unknown token called; it is ignored")
        return None
