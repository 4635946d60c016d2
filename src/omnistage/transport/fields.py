"""Plain values: what `StageData.fields` may hold."""

from __future__ import annotations

from typing import Any

from omnistage.contracts.errors import InvalidRequestError

MAX_DEPTH = 64
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def plain_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of `fields`, tuples as lists.

    Raises `InvalidRequestError` that names the place of the first value which cannot travel.
    """
    return _plain_map(fields, "fields", 0)


def _plain(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is int:
        return _plain_int(value, where)
    if kind is str:
        return _plain_text(value, where)
    if depth >= MAX_DEPTH:
        raise InvalidRequestError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if kind is list or kind is tuple:
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is dict:
        return _plain_map(value, where, depth + 1)
    raise InvalidRequestError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}; allowed are None, bool, int, float, "
        "str, bytes, lists and string-keyed maps; put arrays into tensors, scalars through .item()"
    )


def _plain_map(value: dict[Any, Any], where: str, depth: int) -> dict[str, Any]:
    for key in value:
        if type(key) is not str:
            raise InvalidRequestError(
                f"{where} has the key {key!r} of type {type(key).__name__}; keys must be str"
            )
        _plain_text(key, f"a key of {where}")
    return {key: _plain(item, f"{where}[{key!r}]", depth) for key, item in value.items()}


def _plain_int(value: int, where: str) -> int:
    if not _MIN_INT <= value <= _MAX_INT:
        raise InvalidRequestError(f"{where} is {value}; allowed are -2**63 to 2**64 - 1")
    return value


def _plain_text(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"{where} is no valid Unicode text: {error.reason}") from None
    return value
