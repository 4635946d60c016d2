"""The choice of a platform. Importing and asking need no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omnistage.contracts.errors import ConfigurationError
from omnistage.platforms.base import Platform, parse_device
from omnistage.platforms.cpu import CpuPlatform
from omnistage.platforms.cuda import CudaPlatform

_platforms: dict[str, Platform] = {"cuda": CudaPlatform(), "cpu": CpuPlatform()}
"""By device type, the preferred one first."""


def platforms() -> tuple[Platform, ...]:
    """All known platforms, usable here or not, the preferred one first."""
    return tuple(_platforms.values())


def current_platform() -> Platform:
    """The first platform that can be used here: CUDA where there is a GPU, else the CPU."""
    return next(p for p in _platforms.values() if p.unavailable_reason() is None)


def platform_of(device: str) -> Platform:
    """The platform of a device's name. Says nothing of whether the device exists.

    Raises `ConfigurationError` for a malformed name and an unknown kind.
    """
    kind, _ = parse_device(device)
    if kind not in _platforms:
        raise ConfigurationError(
            f"unknown kind of device {device!r}; allowed: {', '.join(_platforms)}"
        )
    return _platforms[kind]


def validate_device(device: str) -> str:
    """The full name of a device that exists here ("cuda" becomes "cuda:0").

    Raises `ConfigurationError` that says what is missing and what could be used instead.
    """
    return platform_of(device).validate_device(device)


def default_device() -> str:
    """The device to use when nobody says: the first GPU, else the CPU."""
    return current_platform().default_device()


@contextmanager
def register_platform(platform: Platform, *, preferred: bool = False) -> Iterator[Platform]:
    """Add a platform, or replace the one of its kind, while the context is open.

    Process-wide. With `preferred` it comes first in `current_platform`.
    """
    global _platforms
    before = _platforms
    added = {platform.device_type: platform}
    _platforms = {**added, **before, **added} if preferred else {**before, **added}
    try:
        yield platform
    finally:
        _platforms = before
