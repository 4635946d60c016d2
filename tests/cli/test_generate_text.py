"""Text without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import checkpoint
from tests.cli.running import run, the_error

FLAGS = ["--device", "cpu", "--process", "inline", "--prompt", "hello", "--temperature", "0"]


def words(family: str, *more: str) -> list[str]:
    return ["generate", str(checkpoint(family)), *FLAGS, *more]


@pytest.mark.slow
def test_texts_are_printed() -> None:
    one = run(words("qwen3", "--max-tokens", "6", "--system", "be brief"))
    assert one.code == 0, one.err
    text = one.out.removesuffix("\n")
    assert text
    two = run(words("qwen3", "--max-tokens", "6", "--system", "be brief", "--n", "2"))
    assert two.out == f"[1] {text}\n[2] {text}\n"
    raw = run(words("qwen3", "--max-tokens", "6", "--raw"))
    assert raw.code == 0, raw.err
    assert raw.out != one.out


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-100")
@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["--steps", "3"], "--steps: this model writes text"),
        (["--output", "cat.png"], "--output cat.png: this model writes text"),
        (["--output", "cat.wav"], "--output cat.wav: this model writes text"),
        (["--raw", "--system", "x"], "leave --system out"),
    ],
)
def test_flags_of_other_models_are_refused(more: list[str], names: str) -> None:
    ended = run(words("qwen3", *more))
    assert ended.code == 2
    assert names in the_error(ended)


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-100")
def test_a_model_of_pictures_takes_no_text_flags(tmp_path: Path) -> None:
    target = str(tmp_path / "a.png")
    model = str(checkpoint("qwen_image"))
    ended = run(["generate", model, "--prompt", "x", "--output", target, "--max-tokens", "3"])
    assert ended.code == 2
    assert "--max-tokens: this model makes pictures" in the_error(ended)
    ended = run(["generate", model, "--prompt", "x", "--output", str(tmp_path / "a.wav")])
    assert "makes pictures, not sound" in the_error(ended)
