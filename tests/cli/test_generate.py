"""Pictures without a server."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from omnistage.cli.generate import FORMATS, _check_output
from omnistage.contracts.errors import ConfigurationError
from tests.checkpoints.store import checkpoint
from tests.cli.running import finish, run, start, the_error

FLAGS = ["--size", "64x64", "--steps", "2", "--device", "cpu", "--prompt", "a cat"]


def generate(family: str, *words: str) -> list[str]:
    return ["generate", str(checkpoint(family)), *FLAGS, *words]


@pytest.mark.slow
def test_pictures_are_written_and_named(tmp_path: Path) -> None:
    target = tmp_path / "cat.png"
    ended = run(generate("qwen_image", "--output", str(target), "--seed", "1", "--n", "2"))
    assert ended.code == 0, ended.err
    paths = [tmp_path / "cat-1.png", tmp_path / "cat-2.png"]
    assert ended.out.splitlines() == [str(path) for path in paths]
    first, second = (Image.open(path) for path in paths)
    assert first.size == second.size == (64, 64)
    assert first.tobytes() != second.tobytes()
    assert "100%" in ended.err
    assert ended.left_behind == ()


@pytest.mark.slow
def test_the_same_seed_is_the_same_picture(tmp_path: Path) -> None:
    data = []
    for name, process in (("a", "inline"), ("b", "separate")):
        target = tmp_path / f"{name}.png"
        words = ["--output", str(target), "--seed", "3", "--no-progress", "--process", process]
        ended = run(generate("qwen_image", *words))
        assert ended.code == 0, ended.err
        assert ended.out == f"{target}\n"
        assert "%" not in ended.err
        data.append(Image.open(target).tobytes())
    assert data[0] == data[1]


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-100")
def test_a_refused_request_is_one_line(tmp_path: Path) -> None:
    target = tmp_path / "cat.png"
    words = ["--output", str(target), "--extra-args", '{"no_such_argument": 1}', "--no-progress"]
    ended = run(generate("qwen_image", *words))
    assert "no_such_argument" in the_error(ended)
    assert ended.code == 2
    assert not target.exists()


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-101")
@pytest.mark.parametrize("delay_s", [0.5, 3.0])
def test_ctrl_c_ends_everything_with_130(tmp_path: Path, delay_s: float) -> None:
    words = ["--output", str(tmp_path / "cat.png"), "--steps", "100000"]
    child = start(generate("qwen_image", *words))
    time.sleep(delay_s)
    os.kill(child.pid, signal.SIGINT)
    ended = finish(child)
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
    assert ended.left_behind == ()


@pytest.mark.parametrize("suffix", FORMATS)
def test_formats(tmp_path: Path, suffix: str) -> None:
    _check_output(tmp_path / f"cat{suffix}")
    _check_output(tmp_path / f"cat{suffix.upper()}")


@pytest.mark.parametrize("name", ["cat", "cat.gif", "none/cat.png"])
def test_targets_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="--output"):
        _check_output(tmp_path / name)
