"""Checks of a stage's `options`, which its runtime alone knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage


def check_options(
    stage: ResolvedStage, types: Mapping[str, tuple[type, str]], *, kind: str
) -> None:
    """`types` maps an option's name to its type and to words for it; integers must be positive.
    Raises `ConfigurationError` for an unknown option (naming the nearest) and a wrong value."""
    for name, value in stage.options.items():
        if name not in types:
            raise ConfigurationError(
                f"unknown option {name!r} of {kind} stage {stage.stage_id}; "
                f"{suggestion(name, types)}"
            )
        wanted, words = types[name]
        if type(value) is not wanted or (type(value) is int and value < 1):
            raise ConfigurationError(f"option {name} must be {words}, got {value!r}")
