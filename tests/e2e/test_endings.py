"""How a server ends while it is at work: drained, hurried, killed, or before it was ready."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import psutil
import pytest

from omnistage.cli.http_client import read_pictures
from tests.cli.running import finish, start
from tests.e2e.serving import (
    BASE_FLAGS,
    ENDLESS_STEPS,
    GUARD_S,
    Posted,
    model,
    serving,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.invariant("ENTRY-INV-204")]


def test_one_sigterm_lets_the_running_request_finish(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        request = Posted(server, num_inference_steps=400, size="128x128")
        wait_until(lambda: server.replica()["requests"] == 1, "the request to arrive")
        server.signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log, "the signal to be seen")
        answer = request.answer()
        ended = server.end()
    assert isinstance(answer, httpx.Response), answer
    assert len(read_pictures(answer)) == 1
    assert (ended.code, ended.left_behind) == (0, ())
    assert "Traceback" not in server.log


def test_a_second_sigterm_does_not_wait_for_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout-s", str(GUARD_S * 10)) as server:
        request = Posted(server, num_inference_steps=ENDLESS_STEPS)
        wait_until(lambda: server.replica()["requests"] == 1, "the request to arrive")
        server.signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log, "the first signal to be seen")
        server.signal(signal.SIGTERM)
        answer = request.answer()
        ended = server.end()
    if isinstance(answer, httpx.Response):
        assert answer.status_code == 503, answer.text
    assert (ended.code, ended.left_behind) == (128 + signal.SIGTERM, ())
    assert "Traceback" not in server.log


def test_a_server_that_is_killed_at_work_takes_its_replica_along(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        request = Posted(server, num_inference_steps=ENDLESS_STEPS)
        wait_until(lambda: server.replica()["requests"] == 1, "the request to arrive")
        server.signal(signal.SIGKILL)
        assert server.end().left_behind == ()
        assert isinstance(request.answer(), httpx.HTTPError)


def test_sigterm_while_the_model_loads(tmp_path: Path) -> None:
    log_file = tmp_path / "server.log"
    with log_file.open("w") as log:
        child = start(["serve", model(), "--port", "0", *BASE_FLAGS], stderr=log)
    wait_until(lambda: bool(psutil.Process(child.pid).children()), "the replica's process")
    child.send_signal(signal.SIGTERM)
    ended = finish(child)
    assert (ended.code, ended.out, ended.left_behind) == (0, "", ())
    assert "Traceback" not in log_file.read_text()
