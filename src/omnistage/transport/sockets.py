"""Addresses and tokens for the sockets between processes."""

from __future__ import annotations

import hmac
import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

from zmq.constants import SocketOption

if TYPE_CHECKING:
    from zmq.sugar.socket import Socket


def endpoint() -> str:
    """A fresh ZeroMQ address to bind to.

    On Linux an abstract Unix socket: it has no file, so nothing is left behind by any death.
    Elsewhere a free port of the loopback interface, which binding settles.
    """
    if sys.platform == "linux":
        return f"ipc://@omnistage-{new_token()}"
    return "tcp://127.0.0.1:*"


def bind_privately(socket: Socket[Any]) -> str:
    """Bind to a fresh endpoint and return its address.

    An abstract socket has no permissions: whoever is on the host may connect. The kernel tells who
    calls (SO_PEERCRED), and processes of other users are turned away before they can send; those of
    the same user prove themselves by a token.
    """
    if sys.platform == "linux":
        socket.setsockopt(SocketOption.IPC_FILTER_UID, os.geteuid())
    socket.bind(endpoint())
    address: str = socket.getsockopt_string(SocketOption.LAST_ENDPOINT)
    return address


def new_token() -> str:
    """128 random bits as hexadecimal digits."""
    return secrets.token_hex(16)


def tokens_match(left: str, right: str) -> bool:
    """Compare in time that does not depend on where they differ."""
    return hmac.compare_digest(left.encode(), right.encode())
