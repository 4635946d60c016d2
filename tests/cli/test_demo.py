"""What a newcomer runs first."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from PIL import Image

from omnistage.cli.demo import shown_command
from tests.cli.running import finish, run, start

PROMPT = "a small red circle above a blue square on a yellow background"


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-203")
def test_the_demo_makes_a_picture_through_a_server_and_stops_it(tmp_path: Path) -> None:
    ended = run(["demo"], cwd=str(tmp_path))
    assert ended.code == 0, ended.err
    assert ended.left_behind == ()
    path = Path("out") / f"{PROMPT.replace(' ', '-')}.png"
    picture = Image.open(tmp_path / path)
    assert picture.size == (128, 128)
    assert f": {path}\n" in ended.out
    assert "POST http://127.0.0.1:" in ended.out
    for hint in (
        "omnistage serve omnistage/tiny-image --port",
        "curl ",
        "from openai import OpenAI",
    ):
        assert hint in ended.out
    assert len(picture.convert("RGB").getcolors(1 << 16) or []) > 3


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-102")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_ended_takes_its_server_along(
    tmp_path: Path, number: signal.Signals
) -> None:
    child = start(["demo"], cwd=str(tmp_path))
    assert child.stdout is not None
    while not child.stdout.readline().startswith("ready after"):
        assert child.poll() is None
    os.kill(child.pid, number)
    ended = finish(child)
    assert ended.left_behind == ()
    assert ended.code == (130 if number is signal.SIGINT else -number)
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("activated", "inside", "command"),
    [
        (True, True, "omnistage"),
        (False, True, ".venv/bin/omnistage"),
        (False, False, "{bin}/omnistage"),
    ],
)
def test_the_commands_it_shows_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activated: bool, inside: bool, command: str
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "omnistage").touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder) if activated else "/nowhere")
    monkeypatch.chdir(tmp_path if inside else folder)
    assert shown_command() == command.format(bin=folder)
