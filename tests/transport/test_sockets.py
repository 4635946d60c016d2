from __future__ import annotations

import sys

import pytest
import zmq

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
    address = sockets.endpoint()
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        for socket in (a, b):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 30_000)
        a.bind(address)
        b.connect(a.getsockopt_string(zmq.LAST_ENDPOINT))
        b.send_multipart(encode(submit(), [b"buffer"]))
        message, buffers = MessageDecoder(ToReplica).decode(a.recv_multipart(copy=False))
    assert message == submit()
    assert bytes(buffers[0]) == b"buffer"


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
