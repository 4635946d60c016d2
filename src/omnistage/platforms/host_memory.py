"""Memory of the host and of this process, container limits included. Needs no torch."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_KIB = 1024
_PROC = Path("/proc")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """Physical memory, or the container's limit where that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _cgroup_usage())])


def free_bytes() -> int | None:
    """What can be allocated without swapping or reaching the container's limit; None where the
    system does not say."""
    available = _kib_entry(_PROC / "meminfo", "MemAvailable")
    if available is None:
        return None
    return max(0, min([available, *(limit - used for limit, used in _cgroup_usage())]))


def resident_bytes() -> int:
    """What this process has in memory now (its peak, on systems without /proc)."""
    resident = _kib_entry(_PROC / "self/status", "VmRSS")
    return peak_resident_bytes() if resident is None else resident


def peak_resident_bytes() -> int:
    """The highest `resident_bytes` since the start or the last `reset_peak`."""
    peak = _kib_entry(_PROC / "self/status", "VmHWM")
    if peak is not None:
        return peak
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * _KIB


def reset_peak() -> bool:
    """Start the peak anew (proc(5), clear_refs). False where the system cannot."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def cpu_label() -> str:
    """The processor's name as Linux knows it, else the architecture."""
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, os.uname().machine)


def _kib_entry(path: Path, key: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    value = next(values, None)
    return None if value is None else int(value) * _KIB


def _cgroup_usage() -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each limited cgroup above this process."""
    found = []
    for folder in _cgroup_folders():
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            found.append((limit, max(0, used - _reclaimable(folder))))
    return found


def _cgroup_folders() -> list[Path]:
    """The memory cgroup of this process and its ancestors, in version 2 or 1 (cgroups(7))."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _CGROUP_ROOT / controllers
            leaf = root / path.lstrip("/")
            folders += [f for f in (leaf, *leaf.parents) if f == root or root in f.parents]
    return folders


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    entries = dict(line.split()[:2] for line in lines)
    return int(entries.get("inactive_file", entries.get("total_inactive_file", 0)))
