"""`run_server` with the fake engine as a process of its own.

`python -m tests.api.serve_fake PORT plain|hold|slow-start|fail-start` prints what the engine is
told to do; the exit code is the server's.
"""

from __future__ import annotations

import sys

from omnistage.api.server import run_server
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import OmniError, OutOfMemoryError
from tests.api.fake_engine import FakeEngine


def say(line: str) -> None:
    print(line, flush=True)


def make_engine(behaviour: str) -> FakeEngine:
    engine = FakeEngine()
    engine.report = say
    if behaviour == "hold":
        engine.hold.clear()
    if behaviour == "slow-start":
        engine.start_gate.clear()
        engine.state.ready = engine.state.live = False
    if behaviour == "fail-start":
        engine.start_error = OutOfMemoryError("the model does not fit")
    return engine


def main(port: int, behaviour: str) -> int:
    try:
        return run_server(
            lambda: make_engine(behaviour), port=port, settings=ApiSettings(drain_timeout_s=20)
        )
    except OmniError as error:
        say(f"error: {error.message}")
        return 2


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
