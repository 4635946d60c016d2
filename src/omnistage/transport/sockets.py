"""Addresses and tokens for the sockets between processes."""

from __future__ import annotations

import hmac
import secrets
import sys


def endpoint() -> str:
    """A fresh ZeroMQ address to bind to.

    On Linux an abstract Unix socket: it has no file, so nothing is left behind by any death. Any
    user of the host may connect to it; peers prove themselves by a token. Elsewhere a free port of
    the loopback interface: read the socket's `LAST_ENDPOINT` after binding.
    """
    if sys.platform == "linux":
        return f"ipc://@omnistage-{new_token()}"
    return "tcp://127.0.0.1:*"


def new_token() -> str:
    """128 random bits as hexadecimal digits."""
    return secrets.token_hex(16)


def tokens_match(left: str, right: str) -> bool:
    """Compare in time that does not depend on where they differ."""
    return hmac.compare_digest(left.encode(), right.encode())
