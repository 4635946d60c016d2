"""Configuration as plain values: what a replica's process receives instead of an object."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.contracts.errors import ProtocolError

Config = TypeVar("Config", OmniConfig, ResolvedStage)


def to_plain(config: OmniConfig | ResolvedStage) -> dict[str, Any]:
    """Dictionaries (some with int keys), lists, strings, numbers and None; msgpack takes it."""
    plain = msgspec.to_builtins(config, builtin_types=())
    return dict(_sequences_as_lists(plain))


def from_plain(cls: type[Config], plain: Any) -> Config:
    """The configuration that `to_plain` described.

    Raises `ProtocolError` on a missing, unknown or mistyped entry: both sides of a process boundary
    run the same release, so that any difference is a fault.
    """
    try:
        config = msgspec.convert(plain, cls)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"plain {cls.__name__} is malformed: {error}", detail=repr(plain)
        ) from error
    unknown = _unknown_entries(_sequences_as_lists(plain), to_plain(config))
    if unknown:
        raise ProtocolError(f"plain {cls.__name__} has entries that do not belong: {unknown}")
    return config


def _sequences_as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sequences_as_lists(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_sequences_as_lists(item) for item in value]
    return value


def _unknown_entries(given: Any, known: Any, path: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(known, dict):
        found = [f"{path}.{key}".lstrip(".") for key in given if key not in known]
        shared = [key for key in given if key in known]
        return found + [
            entry
            for key in shared
            for entry in _unknown_entries(given[key], known[key], f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(known, list):
        return [
            entry
            for index, (left, right) in enumerate(zip(given, known, strict=False))
            for entry in _unknown_entries(left, right, f"{path}[{index}]")
        ]
    return []
