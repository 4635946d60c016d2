"""The leader's ZeroMQ context belongs to its process and is made once, before leaks are counted."""

from __future__ import annotations

import pytest
import zmq


@pytest.fixture(autouse=True, scope="session")
def zeromq_of_this_process() -> None:
    zmq.Context.instance().socket(zmq.PAIR).close()
