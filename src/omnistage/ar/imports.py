"""Models by import string: the runtimes know none."""

from __future__ import annotations

import importlib
from typing import Any

from omnistage.contracts.errors import ConfigurationError


def load_named(option: str, path: str) -> Any:
    """What `path` ("package.module:Name"), the value of `option`, names. Raises
    `ConfigurationError` where there is no such thing."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"option {option} {path!r} cannot be imported: {error}; write 'package.module:Name'"
        ) from error
