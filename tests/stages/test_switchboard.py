"""The engine's socket: strangers are not listened to, and no message stops it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from omnistage.contracts.errors import ProtocolError, StageLostError
from omnistage.contracts.messages import Hello, Message, Shutdown, Stopped
from omnistage.stages.switchboard import Line, Switchboard
from omnistage.transport.codec import encode
from tests.toy.leaks import nothing_left, wait_until


class Desk:
    """A switchboard with one line, and the sockets that call it."""

    def __init__(self) -> None:
        self.board = Switchboard()
        self.heard: list[Message] = []
        self.malformed: list[ProtocolError] = []
        self.line = Line("right", self._on_message, self.malformed.append)
        self.board.expect(self.line)
        self._context = zmq.asyncio.Context()

    def _on_message(self, message: Message, frames: Any) -> None:
        if isinstance(message, Stopped) and message.stage_id == 99:
            raise IndexError("no such stage")
        self.heard.append(message)

    def caller(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self.board.address)
        return socket

    async def close(self) -> None:
        await self.board.close()
        self._context.destroy(linger=0)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    with nothing_left():
        desk = Desk()
        yield desk
        await desk.close()


def hello(token: str) -> list[Any]:
    return encode(Hello(token=token, pid=1))


@pytest.mark.invariant("STAGE-INV-001")
async def test_strangers_are_ignored_whatever_they_say(desk: Desk) -> None:
    stranger, ours = desk.caller(), desk.caller()
    for parts in ([b"garbage"], [b""], [], encode(Stopped()), hello("wrong")):
        if parts:
            await stranger.send_multipart(parts)
    await ours.send_multipart(hello("right"))
    await ours.send_multipart(encode(Stopped(stage_id=1)))
    await wait_until(lambda: len(desk.heard) == 2, "our own messages")
    await stranger.send_multipart(hello("right"))
    await ours.send_multipart(encode(Stopped(stage_id=2)))
    await wait_until(lambda: len(desk.heard) == 3, "the last message")
    assert [m.stage_id for m in desk.heard] == [-1, 1, 2]
    assert not desk.malformed


@pytest.mark.invariant("STAGE-INV-210")
async def test_a_message_that_cannot_be_handled_costs_its_sender_alone(desk: Desk) -> None:
    ours = desk.caller()
    await ours.send_multipart(hello("right"))
    await ours.send_multipart(encode(Stopped(stage_id=99)))
    await ours.send_multipart([b"\x01garbage"])
    await ours.send_multipart(encode(Stopped(stage_id=1)))
    await wait_until(lambda: len(desk.heard) == 2, "the message after the broken ones")
    assert len(desk.malformed) == 2


async def test_messages_go_to_whom_they_are_sent_and_nowhere_else(desk: Desk) -> None:
    with pytest.raises(StageLostError, match="not connected"):
        desk.board.send(desk.line, Shutdown())
    ours = desk.caller()
    await ours.send_multipart(hello("right"))
    await wait_until(lambda: bool(desk.heard), "the hello")
    large = memoryview(bytes(200_000))
    desk.board.send(desk.line, Shutdown(), [large])
    _, frame = await asyncio.wait_for(ours.recv_multipart(), 10)
    assert len(frame) == 200_000
    ours.close(linger=0)

    def is_gone() -> bool:
        try:
            desk.board.send(desk.line, Shutdown())
        except StageLostError:
            return True
        return False

    await wait_until(is_gone, "the caller to be gone")
    desk.board.forget(desk.line)
    desk.board.forget(desk.line)


async def test_a_closed_switchboard_sends_nothing() -> None:
    desk = Desk()
    ours = desk.caller()
    await ours.send_multipart(hello("right"))
    await wait_until(lambda: bool(desk.heard), "the hello")
    await desk.close()
    with pytest.raises(StageLostError, match="ended"):
        desk.board.send(desk.line, Shutdown())
