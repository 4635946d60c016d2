"""Overrides from the command line or from keyword arguments: they beat every deploy file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omnistage.config.checks import (
    FlagText,
    canonical_keys,
    parse_json,
    require_mapping,
)
from omnistage.config.layers import GLOBAL_KEYS, Layer, split_layer
from omnistage.config.schema import LIMIT_KEYS, STAGE_KEYS
from omnistage.contracts.errors import ConfigurationError

STAGE_FLAG = re.compile(r"^stage[-_](\d+)$")

COMMAND_LINE = "command line"
ARGUMENTS = "arguments"


@dataclass(frozen=True, kw_only=True)
class Overrides(Layer):
    """Checked overrides. `Overrides()` overrides nothing."""

    origin: str = ARGUMENTS

    @classmethod
    def from_kwargs(cls, **settings: Any) -> Overrides:
        """From Python: `max_num_seqs=4`, `limits={…}` or a limit's own name, and
        `stage_overrides={0: {…}}` for one stage. Raises `ConfigurationError`."""
        return cls._checked(settings, origin=ARGUMENTS)

    @classmethod
    def from_flags(cls, flags: Iterable[tuple[str, str]]) -> Overrides:
        """From `(name, text)` pairs of a command line, without the leading dashes: `max-num-seqs`,
        `stage-0.max-num-seqs`, `limits.stream-buffer`, or `stage-0` with one JSON value. Later
        pairs of the same name are errors, never silent winners."""
        tree: dict[str, Any] = {}
        for name, value in flags:
            _insert(tree, name, FlagText(value))
        return cls._checked(tree, origin=COMMAND_LINE)

    @classmethod
    def _checked(cls, settings: dict[str, Any], *, origin: str) -> Overrides:
        rest = dict(settings)
        stages = list(_stage_settings(rest))
        _gather_limits(rest)
        return cls(**split_layer(rest, stages, origin=origin))


def _stage_settings(rest: dict[str, Any]) -> Iterator[tuple[int, Any, str]]:
    """Take what is about single stages out of `rest`; a stage named in both ways is merged."""
    merged: dict[int, dict[str, Any]] = {}
    given = rest.pop("stage_overrides", None) or {}
    if isinstance(given, FlagText):
        given = parse_json(given, "stage_overrides")
    for key, values in require_mapping(given, "stage_overrides").items():
        if not str(key).isdecimal():
            raise ConfigurationError(f"stage_overrides has key {key!r}; keys are stage ids")
        _merge_stage(merged, int(key), values, f"stage_overrides.{key}")
    for name in [name for name in rest if STAGE_FLAG.match(name)]:
        stage_id = int(STAGE_FLAG.match(name)[1])  # type: ignore[index]
        _merge_stage(merged, stage_id, rest.pop(name), name)
    for stage_id, values in merged.items():
        yield stage_id, values, f"stage {stage_id}"


def _merge_stage(merged: dict[int, dict[str, Any]], stage_id: int, values: Any, where: str) -> None:
    if isinstance(values, FlagText):
        values = parse_json(values, where)
    known = merged.setdefault(stage_id, {})
    for name, value in canonical_keys(require_mapping(values, where), STAGE_KEYS, where).items():
        if name in known:
            raise ConfigurationError(f"{where}.{name} is given twice for stage {stage_id}")
        known[name] = value


def _gather_limits(rest: dict[str, Any]) -> None:
    """A limit may be given by its own name, as `max_inflight_requests=8`."""
    for given in list(rest):
        name = given.replace("-", "_")
        if name in LIMIT_KEYS:
            limits = rest.setdefault("limits", {})
            if not isinstance(limits, dict) or name in limits:
                raise ConfigurationError(f"limits.{name} is given twice")
            limits[name] = rest.pop(given)


def _insert(tree: dict[str, Any], dotted: str, value: Any) -> None:
    names = [name.replace("-", "_") for name in dotted.split(".")]
    node = tree
    for name in names[:-1]:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigurationError(f"--{dotted}: --{name} already has one value for everything")
    if names[-1] in node:
        raise ConfigurationError(f"--{dotted} is given twice")
    node[names[-1]] = value


def is_override_flag(name: str) -> bool:
    """Whether a flag (without dashes) addresses a stage or a nested key: `stage-0.process`."""
    head = name.split(".", 1)[0]
    return bool(STAGE_FLAG.match(head)) or ("." in name and head.replace("-", "_") in GLOBAL_KEYS)
