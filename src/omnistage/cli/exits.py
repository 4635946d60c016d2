"""Exit codes of the command."""

from __future__ import annotations

FAILURE = 1
REFUSED = 2
"""Bad flags, configuration that cannot be, a model that cannot be loaded, a refused request."""
INTERRUPTED = 130


class Exit(Exception):
    """End with this code; whatever there is to say has been said."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
