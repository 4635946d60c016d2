"""What of streamed or swapped weights is page-locked, and what the host has to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omnistage.memory.planning.facts import DeviceFacts


@dataclass(frozen=True, kw_only=True)
class Locking:
    """`host_bytes` is memory of the process itself, `locked_bytes` what is page-locked of it and of
    mapped files."""

    locked_components: tuple[str, ...] = ()
    host_bytes: int = 0
    locked_bytes: int = 0


def plan_locking(
    held_bytes: Mapping[str, int],
    facts: DeviceFacts,
    limit_bytes: int | None,
    *,
    own_bytes: int,
    staging_bytes: int = 0,
) -> Locking:
    """`held_bytes` by component, in the order in which they are locked: each wholly or not at all.
    Components that are not locked are copied through page-locked buffers of `staging_bytes`."""
    left_bytes = facts.host_free_bytes if facts.locks_pages else 0
    if limit_bytes is not None:
        left_bytes = min(left_bytes, limit_bytes)
    locked: list[str] = []
    for name, nbytes in held_bytes.items():
        if nbytes <= left_bytes:
            locked.append(name)
            left_bytes -= nbytes
    stages = len(locked) < len(held_bytes)
    buffers_bytes = staging_bytes if stages and facts.locks_pages else 0
    return Locking(
        locked_components=tuple(locked),
        host_bytes=own_bytes + buffers_bytes,
        locked_bytes=sum(held_bytes[name] for name in locked) + buffers_bytes,
    )
