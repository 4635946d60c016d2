"""`omnistage serve` as a process of its own, on a tiny checkpoint, and what tests ask it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from omnistage.cli.http_client import GENERATIONS, generation_body
from tests.checkpoints import checkpoint
from tests.cli.running import Ended, finish, start

GUARD_S = 120.0
"""Guards against hangs on a busy machine; nothing is measured by it."""
ENDLESS_STEPS = 50_000
BASE_FLAGS = ("--host", "127.0.0.1", "--device", "cpu", "--max-steps", str(ENDLESS_STEPS))


def model() -> str:
    return str(checkpoint("qwen_image"))


@dataclass
class Server:
    """A server that has become ready. Its log is a file, so that no pipe can fill up."""

    child: subprocess.Popen[str]
    url: str
    log_file: Path
    ended: Ended | None = field(default=None)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def log_entries(self) -> list[dict[str, Any]]:
        """The log of a server with `--log-json`, without the warnings that libraries print."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=GUARD_S, trust_env=False, **options)

    def health(self) -> dict[str, Any]:
        with self.client() as client:
            body: dict[str, Any] = client.get("/health").json()
            return body

    def replica(self) -> dict[str, Any]:
        """What `/health` says of the only replica."""
        (stage,) = self.health()["stages"]
        replica: dict[str, Any] = stage["replicas"][0]
        return replica

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.child.pid, number)

    def end(self) -> Ended:
        """Wait for the end of a server that was told to stop."""
        if self.ended is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(GUARD_S)  # Reading its output closes stdin, a second order to stop.
            self.ended = finish(self.child, GUARD_S)
        return self.ended


@contextlib.contextmanager
def serving(folder: Path, *flags: str, served: str | None = None) -> Iterator[Server]:
    """Serve the tiny checkpoint, or the model `served`, on a free port; `flags` are those of
    `serve`. Ended, by force if need be, behind."""
    log_file = folder / "server.log"
    with log_file.open("w") as log:
        # A test run that is killed closes the pipe: its servers end with it.
        words = ["serve", served or model(), "--port", "0", "--stop-with-stdin", *BASE_FLAGS]
        child = start([*words, *flags], stderr=log, stdin=subprocess.PIPE)
    try:
        server = Server(child, _await_ready(child, log_file), log_file)
        yield server
        if server.ended is None:
            server.signal(signal.SIGTERM)
            server.end()
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(GUARD_S)


def _await_ready(child: subprocess.Popen[str], log_file: Path) -> str:
    assert child.stdout is not None
    guard = threading.Timer(GUARD_S, child.kill)
    guard.start()
    try:
        line = child.stdout.readline()
    finally:
        guard.cancel()
    assert line.startswith("ready: "), f"the server did not get ready: {log_file.read_text()}"
    return line.rsplit(" at ", 1)[1].strip()


def body(prompt: str = "a cat", **fields: Any) -> dict[str, Any]:
    """A cheap request for one picture of 64 x 64."""
    return generation_body(prompt, **({"size": "64x64", "num_inference_steps": 2} | fields))


def post(server: Server, **fields: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(GENERATIONS, json=body(**fields))


class Posted:
    """A request that runs in a thread of its own. `answer` waits for it."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self._answer: httpx.Response | Exception | None = None

        def run() -> None:
            try:
                self._answer = post(server, **fields)
            except httpx.HTTPError as error:
                self._answer = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def answer(self) -> httpx.Response | Exception:
        self._thread.join(GUARD_S)
        assert self._answer is not None, "no answer in time"
        return self._answer


def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {GUARD_S} s for {what}"
        time.sleep(0.02)
