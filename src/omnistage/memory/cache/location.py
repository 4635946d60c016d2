"""Where the cache lies."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "OMNISTAGE_CACHE"


def weight_cache_folder(setting: str | None = None) -> Path:
    """The `weights` folder of: the setting (`weight_cache_dir`), else $OMNISTAGE_CACHE, else
    $XDG_CACHE_HOME/omnistage, else ~/.cache/omnistage."""
    root = setting or os.environ.get(FOLDER_VARIABLE)
    if root:
        return Path(root).expanduser() / "weights"
    user_caches = os.environ.get("XDG_CACHE_HOME")
    home = Path(user_caches) if user_caches else Path.home() / ".cache"
    return home / "omnistage" / "weights"
