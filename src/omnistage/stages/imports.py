"""Import strings: how configurations name code without importing it."""

from __future__ import annotations

import importlib
from typing import Any

from omnistage.contracts.errors import ConfigurationError


def load_object(import_string: str) -> Any:
    """`"package.module:name"` → the object. Raises `ConfigurationError` naming what is wrong."""
    module_name, _, attribute = import_string.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(
            f"{import_string!r} is no import string; write 'package.module:name'"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"cannot import {import_string!r}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigurationError(f"module {module_name!r} has no {attribute!r}") from error
