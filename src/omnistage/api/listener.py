"""The listening socket, taken before anything slow happens."""

from __future__ import annotations

import errno
import socket

from omnistage.contracts.errors import ConfigurationError

_BACKLOG = 2048
_LAST_PORT = 65_535
_LONGEST_TIMEOUT_MS = 2**31 - 1


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen; connections wait in the backlog until the server accepts them. Port 0 takes
    a free one. Raises `ConfigurationError` that says what to do."""
    if not 0 <= port <= _LAST_PORT:
        raise ConfigurationError(f"port {port} does not exist; use --port with 0 to {_LAST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"{host!r} and port {port} are no address to listen on; use --host and --port"
        ) from error
    # With the protocol: asyncio sets TCP_NODELAY only where it is named (answers wait 40 ms else).
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(_explain(error, host, port)) from error
    listener.setblocking(False)
    return listener


def hang_up_on_dead_readers(listener: socket.socket, timeout_s: float) -> None:
    """Connections taken from now on end when their client takes nothing of its answer for so long.

    Once an answer is written, only the kernel knows of it and holds it (tcp(7), TCP_USER_TIMEOUT;
    other systems have no such limit).
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        timeout_ms = min(int(timeout_s * 1000), _LONGEST_TIMEOUT_MS)
        listener.setsockopt(socket.IPPROTO_TCP, option, max(1, timeout_ms))


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; use --port to choose another"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights; use --port with a number above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; use --host"
    return f"cannot listen on {host} port {port}: {error.strerror}; use --host and --port"


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
