"""A thousand malformed bodies against the real server: all the client's fault, none ours."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from omnistage.cli.http_client import open_picture, read_pictures
from tests.api.test_fuzz import (
    CHAT,
    EDITS,
    FORM,
    GENERATIONS,
    JSON,
    SEEDS,
    form_bodies,
    json_bodies,
)
from tests.e2e.serving import Server, post

pytestmark = [pytest.mark.slow, pytest.mark.invariant("ERR-INV-210")]

REFUSALS = 1000


def bodies() -> Iterator[tuple[str, bytes]]:
    """Damaged requests. They name a model that is not there, so that few survive the damage."""
    wrong = {"model": "no-such-model"}
    routes = {path: json_bodies(SEEDS[path], path, **wrong) for path in (GENERATIONS, CHAT)}
    routes[EDITS] = form_bodies(**wrong)
    for path in itertools.cycle(routes):
        yield path, next(routes[path])


def test_each_is_refused_and_nothing_breaks(server: Server) -> None:
    process = psutil.Process(server.child.pid)
    post(server, size="16x16")
    files_before = process.num_fds()
    refused: Counter[tuple[str, int]] = Counter()
    with server.client() as client:
        for path, body in bodies():
            headers = FORM if path == EDITS else JSON
            answer = client.post(path, content=body, headers=headers)
            if answer.status_code == 200:
                continue
            assert 400 <= answer.status_code < 500, (body, answer.text)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, body
            refused[path, answer.status_code] += 1
            if refused.total() == REFUSALS:
                break
    for path in (GENERATIONS, CHAT, EDITS):
        assert refused[path, 400] > REFUSALS / 6
    assert "Traceback" not in server.log
    assert {entry["level"] for entry in server.log_entries()} <= {"debug", "info"}
    assert process.num_fds() <= files_before + 1  # The pooled connection of the next client.
    assert server.replica()["requests"] == 0
    (data,) = read_pictures(post(server, size="16x16"))
    assert open_picture(data).size == (16, 16)
