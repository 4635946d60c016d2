"""What ZeroMQ makes once a process (a context, a thread for large frames) is made before leaks
are counted."""

from __future__ import annotations

import pytest
import zmq


@pytest.fixture(autouse=True, scope="session")
def zeromq_of_this_process() -> None:
    context = zmq.Context.instance()
    with context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://warm")
        right.connect("inproc://warm")
        right.send(bytes(100_000), copy=False)
        left.recv()
