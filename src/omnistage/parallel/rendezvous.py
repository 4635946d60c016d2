"""Where the ranks of a replica meet: a key-value store that the leader owns, on loopback."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_HOST = "127.0.0.1"
_BACKLOG = 128


class Rendezvous:
    """The leader's store. `address` ("127.0.0.1:port") goes to the ranks in their load message.

    The port is any free one, bound before anybody is told and held until `close`. Whoever is on
    this host may connect to it: as with all of torch's stores there is no password.
    """

    def __init__(self, timeout_s: float) -> None:
        from torch.distributed import TCPStore

        listener = socket.create_server((_HOST, 0), backlog=_BACKLOG)
        port = listener.getsockname()[1]
        self.address = f"{_HOST}:{port}"
        self._store: Store | None = TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._store = None


def connect(address: str, timeout_s: float) -> Store:
    """A rank's client of the leader's store at `address`. Raises `DistNetworkError` of torch when
    nobody listens there."""
    from torch.distributed import TCPStore

    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
