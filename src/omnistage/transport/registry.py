"""The choice of a connector."""

from __future__ import annotations

from omnistage.contracts.errors import ConfigurationError
from omnistage.transport.base import Connector
from omnistage.transport.inline import InlineConnector
from omnistage.transport.segments import shared_memory_usable
from omnistage.transport.shared_memory import SharedMemoryConnector

CONNECTOR_KINDS = ("auto", "inline", "shm")


def make_connector(kind: str, *, shm_threshold_bytes: int) -> Connector:
    """A connector of this kind; "auto" is "shm" where the kernel can and "inline" elsewhere.

    Raises `ConfigurationError` for an unknown kind, a negative threshold, and for "shm" where
    sealed memory files or /proc are missing.
    """
    if kind not in CONNECTOR_KINDS:
        raise ConfigurationError(
            f"unknown connector {kind!r}; allowed: {', '.join(CONNECTOR_KINDS)}"
        )
    if shm_threshold_bytes < 0:
        raise ConfigurationError(f"shm_threshold_bytes is {shm_threshold_bytes}; it must be >= 0")
    if kind == "inline":
        return InlineConnector()
    if shared_memory_usable():
        return SharedMemoryConnector(shm_threshold_bytes)
    if kind == "shm":
        raise ConfigurationError(
            "connector 'shm' needs Linux with sealable memory files (memfd_create) and /proc; "
            "use 'auto' or 'inline'"
        )
    return InlineConnector()
