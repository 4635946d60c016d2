"""Strict checks of keys and values; a message says where, what is allowed and what to do."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from omnistage.config.schema import ALIASES, Key, Quantization
from omnistage.contracts.errors import ConfigurationError

_PATH_IN_MESSAGE = re.compile(r" - at (?:key in )?`(.*)`$")


class FlagText(str):
    """A value as it stood on the command line: still to be parsed as what its key expects."""


_NICKNAMES = {
    "gpu": "cuda",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}
"""What people call a value whose name is not close, or less close than a wrong one."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that a person most likely meant, if any is close."""
    nickname = _NICKNAMES.get(name.lower())
    if nickname in (choices := list(allowed)):
        return nickname
    candidates = {choice.lower().replace("-", "_"): choice for choice in choices}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), candidates, n=1, cutoff=0.6)
    return candidates[close[0]] if close else None


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """ "did you mean 'x'?" or, when nothing is close, all that is allowed."""
    choices = list(allowed)
    close = nearest(name, choices)
    if close is not None:
        return f"did you mean {close!r}?"
    return f"allowed: {', '.join(choices)}" if choices else "nothing is allowed here"


def require_mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where} must be a mapping of keys to values, got {value!r}")
    return dict(value)


def canonical_keys(
    values: Mapping[Any, Any], keys: Mapping[str, Key], where: str
) -> dict[str, Any]:
    """`values` under the schema's own names. Unknown and doubly given keys are errors."""
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = str(given).replace("-", "_")
        name = name if name in keys else ALIASES.get(name, name)
        if not isinstance(given, str) or name not in keys:
            raise ConfigurationError(
                f"unknown key {_join(where, given)}; {suggestion(str(given), keys)}"
            )
        if name in found:
            raise ConfigurationError(f"{_join(where, name)} is given twice, once as {given!r}")
        found[name] = value
    return found


def check_section(values: Any, keys: Mapping[str, Key], where: str) -> dict[str, Any]:
    """Check all keys and values of one mapping and of what is nested in it."""
    mapping = require_mapping(values, where or "the configuration")
    return {
        name: check_value(keys[name], value, _join(where, name))
        for name, value in canonical_keys(mapping, keys, where).items()
    }


def check_value(key: Key, value: Any, where: str) -> Any:
    """`value` as the key's type. Only `FlagText` is parsed; of other values nothing is converted
    but int to float, and true and false to "on" and "off" where these are allowed."""
    from_text = isinstance(value, FlagText)
    if from_text:
        value = _parse_text(key, value, where)
    if key.nested is not None:
        return check_section(value, key.nested, where)
    value = plain_value(value, where)
    if isinstance(value, bool) and {"on", "off"} <= set(get_args(key.type)):
        value = "on" if value else "off"  # what YAML makes of these words
    try:
        return msgspec.convert(value, key.type, strict=not from_text)
    except msgspec.ValidationError as error:
        expected = _expectation(key, value, error)
        raise ConfigurationError(f"{where} is {value!r}; {expected}") from None


def plain_value(value: Any, where: str) -> Any:
    """A private copy made of dictionaries, lists and scalars only."""
    if isinstance(value, FlagText):
        return _guess(value)
    if isinstance(value, Mapping):
        return {key: plain_value(item, _join(where, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}; allowed are mappings, lists, strings, numbers, "
        "booleans and null"
    )


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_pairs)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not valid JSON: {text!r}: {error}") from None


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name!r} is given twice")
        found[name] = value
    return found


def _parse_text(key: Key, text: str, where: str) -> Any:
    if key.nested is not None or get_origin(key.type) is dict:
        return parse_json(text, where)
    if key.type == str | list[str | int] and text.startswith("["):
        return parse_json(text, where)
    if key.type == Quantization:
        return _parse_quantization(text, where)
    if text.lower() in ("null", "none") and type(None) in get_args(key.type):
        return None
    return str(text)


def _parse_quantization(text: str, where: str) -> Any:
    """ "none" stays a word: full precision is not what a setting left out means."""
    if text.lstrip().startswith("{"):
        return parse_json(text, where)
    return None if text.lower() == "null" else str(text)


def _guess(text: FlagText) -> Any:
    """A flag whose type nobody declares: JSON where it reads as JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return str(text)


def _expectation(key: Key, value: Any, error: msgspec.ValidationError) -> str:
    if get_origin(key.type) is Literal:
        return f"allowed: {', '.join(get_args(key.type))}" + _did_you_mean(value, key)
    message = str(error)
    place = _PATH_IN_MESSAGE.search(message)
    message = _PATH_IN_MESSAGE.sub("", message).replace("`", "").replace("Expected", "expected")
    return message + (f" at {place[1].removeprefix('$')}" if place else "")


def _did_you_mean(value: Any, key: Key) -> str:
    close = nearest(value, get_args(key.type)) if isinstance(value, str) else None
    return f"; did you mean {close!r}?" if close else ""


def _join(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)
