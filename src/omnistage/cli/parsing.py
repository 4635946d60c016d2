"""Parsing flags: no abbreviations, nothing ignored, unknown ones name the nearest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from omnistage.config.checks import suggestion
from omnistage.config.overrides import is_override_flag
from omnistage.contracts.errors import ConfigurationError


class CommandParser(argparse.ArgumentParser):
    """`takes_overrides` is set by commands that resolve a model's configuration: they accept
    dotted flags such as `--stage-0.max-num-seqs 4`."""

    takes_overrides = False

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(
                prog, max_help_position=34, width=100
            ),
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")

    def flag_names(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


class OverrideAction(argparse.Action):
    """Collects (name, text) pairs into `args.overrides`, where configuration checks them."""

    def __init__(self, *, override: str, negated: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self.override = override
        self.negated = negated

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs == 0:
            values = "false" if option_string in self.negated else "true"
        namespace.overrides.append((self.override, values))


def parse_arguments(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse everything; `overrides` holds the configuration's flags in their order.

    Raises `ConfigurationError` for unknown flags and missing or surplus values.
    """
    dotted, rest = _split_dotted(list(argv)) if parser.takes_overrides else ([], list(argv))
    _refuse_unknown(parser, rest)
    namespace = argparse.Namespace(overrides=dotted)
    args, surplus = parser.parse_known_args(rest, namespace)
    if surplus:
        raise ConfigurationError(f"unexpected {surplus[0]!r}; see {parser.prog} --help")
    return args


def _split_dotted(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Take `--stage-0.key value` and `--stage-0.key=value` out of the arguments."""
    dotted: list[tuple[str, str]] = []
    rest: list[str] = []
    words: Iterator[str] = iter(argv)
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        if word == "--":
            rest += [word, *words]
        elif word.startswith("--") and is_override_flag(name):
            if not has_value:
                value = next(words, "")
            if not value or value.startswith("--"):
                raise ConfigurationError(f"--{name} needs a value")
            dotted.append((name, value))
        else:
            rest.append(word)
    return dotted, rest


def _refuse_unknown(parser: CommandParser, argv: list[str]) -> None:
    known = parser.flag_names()
    for word in argv:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if word.startswith("--") and flag not in known:
            raise ConfigurationError(f"unknown flag {flag}; {_flag_suggestion(flag, known)}")


def _flag_suggestion(flag: str, known: list[str]) -> str:
    names = [name for name in known if name.startswith("--")]
    hint = suggestion(flag, names)
    return hint if hint.startswith("did you mean") else "--help lists all"
