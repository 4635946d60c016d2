"""Where the cache lies."""

from __future__ import annotations

import os
from pathlib import Path

from omnistage.contracts.errors import ConfigurationError

FOLDER_VARIABLE = "OMNISTAGE_CACHE"


def weight_cache_folder(setting: str | None = None) -> Path:
    """The `weights` folder of: the setting (`weight_cache_dir`), else $OMNISTAGE_CACHE, else
    $XDG_CACHE_HOME/omnistage, else ~/.cache/omnistage.

    Raises `ConfigurationError` for what cannot be a path.
    """
    root = setting or os.environ.get(FOLDER_VARIABLE)
    if root:
        return _expanded(root) / "weights"
    user_caches = os.environ.get("XDG_CACHE_HOME")
    home = Path(user_caches) if user_caches else Path.home() / ".cache"
    return home / "omnistage" / "weights"


def _expanded(root: str) -> Path:
    try:
        if "\0" in root:
            raise RuntimeError("it has a zero byte")
        return Path(root).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{root!r} cannot be the cache's folder: {error}; give another weight_cache_dir, or "
            f"another {FOLDER_VARIABLE}"
        ) from error
