"""Which device each rank of each replica of a stage gets."""

from __future__ import annotations

import re
from collections.abc import Sequence

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError

_DEVICE = re.compile(r"^(cpu|cuda(:\d+)?)$")


def resolve_devices(
    *,
    stage_id: int,
    device: str,
    devices: str | list[str | int] | None,
    ranks: int,
    replicas: int,
    accelerators: Sequence[str],
) -> tuple[str, ...]:
    """One device a rank for each replica in turn, or one replica's worth that all replicas share.

    `accelerators` are the devices of this machine, as ("cuda:0", "cuda:1").
    """
    if devices is None:
        return _default_devices(stage_id, device, ranks * replicas, accelerators)
    listed = [_device_name(stage_id, entry) for entry in _as_list(devices)]
    if len(listed) not in (ranks, ranks * replicas):
        wanted = f"{ranks}" if replicas == 1 else f"{ranks} (shared) or {ranks * replicas}"
        raise UnsupportedCombinationError(
            f"stage {stage_id}: devices lists {len(listed)} ({', '.join(listed)}), but "
            f"{ranks} rank(s) × {replicas} replica(s) need {wanted}"
        )
    for name in listed:
        if name != "cpu" and name not in accelerators:
            raise ConfigurationError(
                f"stage {stage_id}: device {name} does not exist; {_what_exists(accelerators)}"
            )
    return tuple(listed)


def _default_devices(
    stage_id: int, device: str, count: int, accelerators: Sequence[str]
) -> tuple[str, ...]:
    if device == "cpu" or (device == "auto" and not accelerators):
        return ("cpu",) * count
    if not accelerators:
        raise ConfigurationError(
            f"stage {stage_id}: device {device!r} was asked for, but "
            f"{_what_exists(accelerators)}; use --device cpu, or run `omnistage doctor`"
        )
    if count > len(accelerators):
        raise UnsupportedCombinationError(
            f"stage {stage_id}: its ranks and replicas need {count} GPUs, but "
            f"{_what_exists(accelerators)}; ask for fewer, or list `devices` to share them"
        )
    return tuple(accelerators[:count])


def _as_list(devices: str | list[str | int]) -> list[str | int]:
    if isinstance(devices, str):
        return [part.strip() for part in devices.split(",")]
    return devices


def _device_name(stage_id: int, entry: str | int) -> str:
    name = f"cuda:{entry}" if str(entry).isdecimal() else str(entry)
    if not _DEVICE.match(name):
        raise ConfigurationError(
            f"stage {stage_id}: {entry!r} is no device; allowed: cpu, cuda:N, or the number N"
        )
    return "cuda:0" if name == "cuda" else name


def _what_exists(accelerators: Sequence[str]) -> str:
    if not accelerators:
        return "no GPU is usable on this machine"
    return f"this machine has {', '.join(accelerators)}"
