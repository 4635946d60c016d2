"""The server as users start it, with a tiny model in the real layout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from omnistage.cli.http_client import generation_body, open_picture, read_pictures
from omnistage.cli.main import main
from omnistage.cli.serve import api_settings
from omnistage.cli.server_process import RunningServer, ServerEnded, running_server
from omnistage.contracts.errors import ConfigurationError, DeadlineExceededError
from tests.checkpoints.store import checkpoint
from tests.cli.running import finish, start
from tests.cli.test_parsing import parse

QUIET = ["--log-level", "warning", "--device", "cpu"]


def ask(url: str, **fields: object) -> httpx.Response:
    body = generation_body("a cat", size="64x64", num_inference_steps=2, seed=0, **fields)
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=120, trust_env=False)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = [*QUIET, "--max-n", "2", "--max-generated-image-size", "64x64", "--max-steps", "4"]
    with running_server(str(checkpoint("qwen_image")), flags) as running:
        yield running


@pytest.mark.slow
def test_a_picture_comes_back(server: RunningServer) -> None:
    (data,) = read_pictures(ask(server.url))
    assert open_picture(data).size == (64, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"n": 3}, {"size": "128x128"}, {"num_inference_steps": 5}], ids=str
)
def test_the_limits_of_the_command_line_hold(
    server: RunningServer, fields: dict[str, object]
) -> None:
    body = generation_body("a cat", size="64x64", num_inference_steps=2) | fields
    answer = httpx.post(f"{server.url}/v1/images/generations", json=body, trust_env=False)
    assert answer.status_code == 400, answer.text


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-202")
def test_bench_measures_it_and_ends_with_one_json_object(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--url",
        server.url,
        "--peer-url",
        server.url,
        "--peer-model",
        Path(server_model()).name,
    ]
    words += ["--requests", "3", "--concurrency", "2", "--warmup", "1", "--size", "64x64"]
    assert main(["bench", Path(server_model()).name, *words, "--steps", "2"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {
        *("name", "value", "unit", "peer", "peer_value", "ratio", "target", "met"),
        *("hardware", "versions", "workload"),
    } <= set(summary)
    assert summary["value"] > 0
    assert summary["ratio"] == pytest.approx(summary["value"] / summary["peer_value"], rel=1e-2)
    assert summary["failures"] == 0
    assert "3 requests, 2 at a time" in summary["workload"]


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-202")
def test_bench_fails_when_its_target_is_missed(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--url", server.url, "--requests", "1", "--size", "64x64", "--steps", "2"]
    code = main(["bench", Path(server_model()).name, *words, "--target", "1e9", "--warmup", "0"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1
    assert summary["met"] is False
    assert summary["target"] == 1e9


def server_model() -> str:
    return str(checkpoint("qwen_image"))


def serving(*flags: str) -> subprocess.Popen[str]:
    """A server of its own session that has become ready."""
    child = start(["serve", server_model(), "--port", "0", *QUIET, *flags])
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line.startswith("ready: "), line
    return child


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-101")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_order(number: signal.Signals) -> None:
    child = serving()
    os.kill(child.pid, number)
    ended = finish(child)
    assert ended.code == 0, ended.err
    assert ended.left_behind == ()
    assert "Traceback" not in ended.err


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-102")
def test_a_killed_server_leaves_no_process() -> None:
    child = serving()
    os.kill(child.pid, signal.SIGKILL)
    assert finish(child).left_behind == ()


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-102")
def test_a_server_ends_with_the_block_that_started_it() -> None:
    pids = []

    def interrupted_block() -> None:
        with running_server(server_model(), QUIET) as running:
            pids.append(running.pid)
            assert httpx.get(f"{running.url}/health", trust_env=False).status_code == 200
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_block()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.invariant("CLI-INV-102")
def test_a_server_that_cannot_start_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServerEnded) as caught, running_server("/no/such/model"):
        pass
    assert caught.value.exit_code == 2
    assert capfd.readouterr().err.startswith("omnistage: error: model '/no/such/model'")


@pytest.mark.invariant("CLI-INV-102")
def test_a_server_that_is_not_ready_in_time_is_stopped() -> None:
    before = set(psutil.Process().children(recursive=True))
    slow = running_server(server_model(), QUIET, start_deadline_s=0.2)
    with pytest.raises(DeadlineExceededError, match=r"not ready within 0\.2 s"), slow:
        pass
    assert set(psutil.Process().children(recursive=True)) <= before


def test_api_settings_from_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_API_KEY", "from-environment")
    plain = api_settings(parse("serve", "m"))
    assert plain.api_keys == ("from-environment",)
    assert plain.max_pixels == 7680 * 4320
    words = ["--api-key", "a", "--api-key", "b", "--max-generated-image-size", "10x20"]
    words += ["--allowed-local-media-path", str(tmp_path), "--allow-private-media"]
    words += ["--max-steps", "7", "--body-timeout-s", "1.5"]
    settings = api_settings(parse("serve", "m", *words))
    assert settings.api_keys == ("a", "b")
    assert settings.max_pixels == 200
    assert settings.allowed_local_media_path == tmp_path
    assert settings.allow_private_media
    assert not settings.allow_http_media
    assert settings.max_steps == 7
    assert settings.body_timeout_s == 1.5


def test_api_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="body_timeout_s is 0"):
        api_settings(parse("serve", "m", "--body-timeout-s", "0"))
    for text in ("inf", "nan"):
        with pytest.raises(ConfigurationError, match=f"drain_timeout_s is {text}"):
            api_settings(parse("serve", "m", "--drain-timeout-s", text))
