from __future__ import annotations

import os
import sys

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from omnistage.contracts.messages import ToReplica
from omnistage.transport import sockets
from omnistage.transport.codec import MessageDecoder, encode
from tests.transport.samples import submit


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_messages_pass_through_a_bound_endpoint(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("abstract sockets are Linux's")
    monkeypatch.setattr(sockets.sys, "platform", platform)
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        for socket in (a, b):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 30_000)
        b.connect(sockets.bind_privately(a))
        b.send_multipart(encode(submit(), [b"buffer"]))
        message, buffers = MessageDecoder(ToReplica).decode(a.recv_multipart(copy=False))
    assert message == submit()
    assert bytes(buffers[0]) == b"buffer"


@pytest.mark.invariant("TRANSPORT-INV-004")
@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roles are swapped: what is bound believes to belong to somebody else."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as a, context.socket(zmq.DEALER) as b:
        for socket in (a, b):
            socket.setsockopt(zmq.LINGER, 0)
        monkeypatch.setattr(sockets.os, "geteuid", lambda: os.getuid() + 1)
        monitor = b.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        b.connect(sockets.bind_privately(a))
        b.send(b"hello")
        assert monitor.poll(30_000), "neither let in nor turned away"
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        assert not a.poll(0)
        b.disable_monitor()


def test_endpoints_and_tokens_are_fresh() -> None:
    assert len({sockets.endpoint() for _ in range(50)}) == 50
    assert len({sockets.new_token() for _ in range(50)}) == 50
    assert len(sockets.new_token()) == 32


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [("a", "a", True), ("a", "b", False), ("", "a", False), ("é", "é", True)],
)
def test_tokens_are_compared(left: str, right: str, same: bool) -> None:
    assert sockets.tokens_match(left, right) is same
