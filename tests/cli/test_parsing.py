"""Flags: strict, generated from the schema, and explained when wrong."""

from __future__ import annotations

import argparse
import importlib

import pytest

from omnistage.cli import values
from omnistage.cli.main import COMMANDS, main
from omnistage.cli.model_flags import as_flags, overrides
from omnistage.cli.parsing import CommandParser, parse_arguments
from omnistage.config.schema import ALIASES, DEPLOYMENT_KEYS, LIMIT_KEYS, STAGE_KEYS
from omnistage.contracts.errors import ConfigurationError


def parser_of(command: str) -> CommandParser:
    parser = CommandParser(prog=f"omnistage {command}")
    importlib.import_module(f"omnistage.cli.{command}").add_arguments(parser)
    return parser


def parse(command: str, *words: str) -> argparse.Namespace:
    return parse_arguments(parser_of(command), words)


@pytest.mark.invariant("CLI-INV-001")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "m", "--prot", "1"], "unknown flag --prot; did you mean '--port'?"),
        (["serve", "m", "--max-num-seq=1"], "unknown flag --max-num-seq; did you mean"),
        (["serve", "m", "--no-such-thing-at-all"], "--help lists all"),
        (["serve", "m", "--stage-0.max-num-seq", "1"], "did you mean 'max_num_seqs'?"),
        (["serve", "m", "--limits.stream-bufer", "1"], "did you mean 'stream_buffer'?"),
        (["generate", "--prompt", "x", "--setps", "3"], "did you mean '--steps'?"),
        (["doctor", "--jsn"], "did you mean '--json'?"),
        (["demo", "--stage-0.process", "inline"], "unknown flag --stage-0.process"),
        (["srve"], "unknown command 'srve'; did you mean 'serve'?"),
        (["--verison"], "unknown flag '--verison'"),
        (["serve", "m", "surplus"], "unexpected 'surplus'"),
        (["serve"], "required: MODEL; see omnistage serve --help"),
        (["serve", "m", "--stage-0.process"], "--stage-0.process needs a value"),
        (["serve", "m", "--stage-0.process", "--port"], "--stage-0.process needs a value"),
    ],
)
def test_what_is_unknown_names_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("omnistage: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.invariant("CLI-INV-201")
@pytest.mark.parametrize("command", ["serve", "generate", "plan", "bench"])
def test_every_key_of_the_schema_is_a_flag(command: str) -> None:
    flags = parser_of(command).flag_names()
    keys = STAGE_KEYS | DEPLOYMENT_KEYS | LIMIT_KEYS
    offered = [name for name, key in keys.items() if key.flag] + ["device", *ALIASES]
    assert [n for n in offered if f"--{n.replace('_', '-')}" not in flags] == []


@pytest.mark.invariant("CLI-INV-201")
def test_flags_become_overrides() -> None:
    args = parse(
        "serve",
        "m",
        "--max-num-seqs",
        "2",
        "--no-enforce-eager",
        "--vae-use-tiling",
        "--max-queue=9",
        "--stage-init-timeout",
        "5",
        "--stage-0.dtype=float32",
        "--default-sampling-params",
        '{"height": 8}',
        "--omni",
    )
    layer = overrides(args)
    assert layer.stage_defaults == {
        "max_num_seqs": 2,
        "enforce_eager": False,
        "options": {"vae_tiling": True},
        "init_timeout": 5.0,
        "default_sampling_params": {"height": 8},
    }
    assert layer.deployment == {"limits": {"max_inflight_requests": 9}}
    assert layer.stages == {0: {"dtype": "float32"}}


@pytest.mark.parametrize("off", ["--no-dlo-use-allgather", "--dlo-no-use-allgather"])
def test_gathering_is_turned_off_in_either_spelling(off: str) -> None:
    layer = overrides(parse("serve", "m", "--enable-distributed-layerwise-offload", off))
    assert layer.stage_defaults["dlo_use_allgather"] is False
    on = overrides(parse("serve", "m", "--dlo-use-allgather"))
    assert on.stage_defaults == {"dlo_use_allgather": True}


@pytest.mark.invariant("CLI-INV-201")
def test_flags_can_be_handed_on() -> None:
    words = [
        *(
            "m",
            "--enforce-eager",
            "--log-json",
            "--vae-use-slicing",
            "--deploy-config",
            "single_process",
        ),
        *("--limits.stream-buffer", "3", "--stage-0.dtype", "auto", "--max-queue", "2"),
    ]
    args = parse("bench", *words)
    again = parse("serve", "m", *as_flags(args))
    assert again.deploy_config == "single_process"
    assert overrides(again) == overrides(args)
    off = parse("serve", "m", *as_flags(parse("bench", "m", "--no-enforce-eager")))
    assert overrides(off).stage_defaults == {"enforce_eager": False}


def test_a_dotted_flag_does_not_swallow_the_model() -> None:
    args = parse("serve", "--stage-0.max-num-seqs", "4", "m")
    assert args.model == "m"
    assert args.overrides == [("stage-0.max-num-seqs", "4")]


def test_words_after_two_dashes_are_no_flags() -> None:
    assert parse("serve", "--", "--odd-name").model == "--odd-name"


@pytest.mark.parametrize("text", ["", "1024", "0x10", "10x0", "axb", "1x2x3", "-1x2"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="1024x768"):
        values.size(text)


def test_values() -> None:
    assert values.size("64x32") == (64, 32)
    assert values.at_least_one("3") == 3
    assert values.number("1e-3") == 0.001
    for text in ("0", "-1", "x", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            values.at_least_one(text)
    with pytest.raises(argparse.ArgumentTypeError):
        values.number("x")


def test_a_bad_value_names_the_flag() -> None:
    with pytest.raises(ConfigurationError, match=r"--size: 'big' is no size"):
        parse("generate", "--prompt", "x", "--size", "big")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([command, "--help"])
    assert ending.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: omnistage {command}")
    assert all(len(line) <= 100 for line in text.splitlines())
