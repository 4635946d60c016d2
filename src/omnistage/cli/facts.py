"""Facts of the machine and the installation, for `doctor` and `bench`."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

from omnistage.platforms.host_memory import cpu_label, total_bytes
from omnistage.platforms.registry import platforms


@dataclass(frozen=True, kw_only=True)
class Package:
    """`installed` is None when it is absent; `satisfied` whether its version will do."""

    name: str
    wanted: str
    installed: str | None
    satisfied: bool


def required_packages() -> list[Package]:
    """What OmniStage's own metadata asks for, without extras."""
    wanted = [text for text in metadata.requires("omnistage") or [] if "extra ==" not in text]
    return [package(text) for text in sorted(wanted, key=str.lower)]


def package(requirement: str) -> Package:
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    version = installed_version(parsed.name)
    return Package(
        name=parsed.name,
        wanted=str(parsed.specifier) or "any",
        installed=version,
        satisfied=version is not None and parsed.specifier.contains(version, prereleases=True),
    )


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def hardware() -> str:
    """Processor, cores and memory, then each GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{cpu_label()}, {cores} cores, {total_bytes() / 2**30:.0f} GiB"]
    for kind in platforms():
        if kind.device_type != "cpu":
            parts += [info.label for info in kind.devices()]
    return "; ".join(parts)


def versions() -> dict[str, str]:
    names = ("omnistage", "torch", "diffusers", "transformers", "uvicorn", "msgspec")
    found = {name: installed_version(name) or "absent" for name in names}
    return {"python": platform.python_version()} | found
