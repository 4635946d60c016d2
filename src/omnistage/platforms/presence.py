"""Which accelerators this process may use, found without importing torch.

The engine and the command line resolve placement before any process that needs torch exists.
"""

from __future__ import annotations

from omnistage.platforms.registry import platforms


def visible_accelerators() -> tuple[str, ...]:
    """Names as torch numbers them ("cuda:0", "cuda:1"), the preferred kind first; empty without a
    driver, and where the installed torch cannot use it."""
    accelerators = (p for p in platforms() if p.device_type != "cpu")
    return tuple(info.name for platform in accelerators for info in platform.devices())
