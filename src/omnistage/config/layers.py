"""One layer of settings, as a deploy file or a set of overrides gives it, checked and sparse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omnistage.config.checks import canonical_keys, check_section, check_value, require_mapping
from omnistage.config.schema import DEPLOYMENT_KEYS, SCHEMA_VERSION, STAGE_KEYS
from omnistage.contracts.errors import ConfigurationError

GLOBAL_KEYS = DEPLOYMENT_KEYS | STAGE_KEYS
"""What may stand at the top: the deployment's own keys and defaults for every stage."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one source says; a key that is absent leaves the layer below in force.

    `origin` names the source for people. `deployment` holds the deployment's own keys (`limits`
    among them), `stage_defaults` what holds for every stage, `stages` what holds for one.
    """

    origin: str
    deployment: dict[str, Any] = field(default_factory=dict)
    stage_defaults: dict[str, Any] = field(default_factory=dict)
    stages: dict[int, dict[str, Any]] = field(default_factory=dict)


def split_layer(
    settings: Mapping[str, Any],
    stages: Iterable[tuple[int, Any, str]],
    *,
    origin: str,
) -> dict[str, Any]:
    """The fields of a `Layer`. `stages` yields (stage id, settings, path for messages)."""
    top = {
        name: check_value(GLOBAL_KEYS[name], value, name)
        for name, value in canonical_keys(settings, GLOBAL_KEYS, "").items()
    }
    _check_version(top.pop("schema_version", SCHEMA_VERSION))
    by_stage: dict[int, dict[str, Any]] = {}
    for stage_id, values, where in stages:
        if stage_id in by_stage:
            raise ConfigurationError(f"stage_id {stage_id} is given twice, again at {where}")
        by_stage[stage_id] = check_section(values, STAGE_KEYS, where)
    return {
        "origin": origin,
        "deployment": {name: value for name, value in top.items() if name in DEPLOYMENT_KEYS},
        "stage_defaults": _without_stage_ids(top, by_stage),
        "stages": by_stage,
    }


def _without_stage_ids(top: dict[str, Any], by_stage: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Move sampling defaults that are keyed by stage id to their stages."""
    defaults = {name: value for name, value in top.items() if name in STAGE_KEYS}
    sampling = defaults.get("default_sampling_params", {})
    numbered = {name: value for name, value in sampling.items() if str(name).isdecimal()}
    if not numbered:
        return defaults
    if len(numbered) != len(sampling):
        raise ConfigurationError(
            "default_sampling_params mixes stage ids and parameter names: "
            f"{', '.join(map(str, sampling))}; use one or the other"
        )
    for name, value in numbered.items():
        where = f"default_sampling_params.{name}"
        stage = by_stage.setdefault(int(name), {})
        if "default_sampling_params" in stage:
            raise ConfigurationError(f"{where} is given twice, also for the stage itself")
        stage["default_sampling_params"] = require_mapping(value, where)
    return {name: value for name, value in defaults.items() if name != "default_sampling_params"}


def _check_version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise ConfigurationError(
            f"schema_version is {version}; this release reads version {SCHEMA_VERSION}"
        )
