"""What ZeroMQ makes once a process (a context, a thread for large frames) is made before leaks
are counted. Fixtures of more than one file."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import zmq

from tests.stages import odd_runtime
from tests.toy.leaks import nothing_left


@pytest.fixture(autouse=True, scope="session")
def zeromq_of_this_process() -> None:
    context = zmq.Context.instance()
    with context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://warm")
        right.connect("inproc://warm")
        right.send(bytes(100_000), copy=False)
        left.recv()


@pytest.fixture
def leak_free_gate() -> Iterator[None]:
    """The gate of gated work is closed; afterwards nothing may be left that was not there."""
    odd_runtime.gate.clear()
    odd_runtime.at_gate.clear()
    with nothing_left():
        yield
        odd_runtime.gate.set()


@pytest.fixture
def error_lines() -> Iterator[list[str]]:
    """What the output worker logs as errors."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("omnistage.stages.output_worker"), Collect(logging.ERROR)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
