"""Show what is installed, which devices and kernels work, what is missing and how to get it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from omnistage import __version__
from omnistage.cli.facts import hardware, installed_version, required_packages
from omnistage.cli.parsing import CommandParser
from omnistage.contracts.errors import OmniError

if TYPE_CHECKING:
    from omnistage.platforms.base import Platform

OPTIONAL_PACKAGES = {
    "openai": "the client that most people drive the server with",
    "ftfy": "cleans prompts for the pipelines of Wan, SkyReels and DeepFloyd",
    "protobuf": "reads some SentencePiece tokenizers",
    "triton": "compiled kernels on GPUs; torch brings it along on Linux",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `state` is "ok", "missing" (something needed) or "note"; `remedy`
    says how to get what is missing."""

    section: str
    subject: str
    state: str
    detail: str
    remedy: str | None = None


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="leave out the kernels, which needs torch"
    )


def run(args: argparse.Namespace) -> int:
    findings = list(examine(quick=args.quick))
    healthy = all(finding.state != "missing" for finding in findings)
    if args.json:
        report = {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        _print(findings, healthy)
    return 0 if healthy else 1


def examine(*, quick: bool = False) -> Iterator[Finding]:
    """Look at everything; nothing is changed and no model is loaded."""
    yield Finding(section="system", subject="hardware", state="ok", detail=hardware())
    yield _python()
    yield from _packages()
    yield from _devices()
    if not quick:
        yield from _kernels()
    yield _shared_memory()
    yield _bundled_model()


def _python() -> Finding:
    fits = sys.version_info >= (3, 11)
    return Finding(
        section="system",
        subject="python",
        state="ok" if fits else "missing",
        detail=f"{sys.version.split()[0]}, omnistage {__version__}",
        remedy=None if fits else "install Python 3.11 or newer",
    )


def _packages() -> Iterator[Finding]:
    for package in required_packages():
        yield Finding(
            section="packages",
            subject=package.name,
            state="ok" if package.satisfied else "missing",
            detail=f"{package.installed or 'not installed'} (needed: {package.wanted})",
            remedy=None if package.satisfied else f"pip install '{package.name}{package.wanted}'",
        )
    for name, purpose in OPTIONAL_PACKAGES.items():
        version = installed_version(name)
        yield Finding(
            section="optional packages",
            subject=name,
            state="ok" if version else "note",
            detail=f"{version or 'not installed'}: {purpose}",
            remedy=None if version else f"pip install {name}",
        )


def _devices() -> Iterator[Finding]:
    from omnistage.platforms.registry import platforms

    for kind in platforms():
        reason = kind.unavailable_reason()
        if reason:
            yield Finding(
                section="devices", subject=kind.device_type, state="note", detail=f"none: {reason}"
            )
        for info in kind.devices() if not reason else ():
            free = "" if info.free_bytes is None else f", {info.free_bytes / 2**30:.1f} free"
            yield Finding(
                section="devices",
                subject=info.name,
                state="ok",
                detail=f"{info.label}, {info.total_bytes / 2**30:.1f} GiB{free}",
            )


def _kernels() -> Iterator[Finding]:
    """Found by running them; a broken torch is a finding, not a crash."""
    from omnistage.platforms.registry import platforms

    for kind in platforms():
        for info in () if kind.unavailable_reason() else kind.devices():
            look = partial(_describe_kernels, kind, info.name)
            yield _examined("kernels", info.name, "pip install --force-reinstall torch", look)


def _describe_kernels(kind: Platform, device: str) -> str:
    found = kind.capabilities(device)
    dtypes = ["float32"] + [name for name in ("bfloat16", "float8") if getattr(found, name)]
    parts = [f"attention {', '.join(found.attention_kernels) or 'none'}", ", ".join(dtypes)]
    if found.compute_capability:
        parts.append("compute capability {}.{}".format(*found.compute_capability))
    if found.triton:
        parts.append(f"triton {found.triton}")
    return "; ".join(parts)


def _shared_memory() -> Finding:
    from omnistage.transport.segments import shared_memory_usable

    usable = shared_memory_usable()
    return Finding(
        section="system",
        subject="shared memory",
        state="ok" if usable else "note",
        detail="usable" if usable else "not usable here: tensors travel inside messages",
    )


def _bundled_model() -> Finding:
    from omnistage.cli.model_flags import DEFAULT_MODEL
    from omnistage.models.registry import find_pipeline

    return _examined(
        "models",
        DEFAULT_MODEL,
        "pip install --force-reinstall omnistage",
        lambda: str(find_pipeline(DEFAULT_MODEL).model_path),
    )


def _examined(section: str, subject: str, remedy: str, look: Callable[[], str]) -> Finding:
    try:
        detail = look()
    except (OmniError, ImportError, OSError, RuntimeError) as error:
        return Finding(
            section=section,
            subject=subject,
            state="missing",
            detail=f"{type(error).__name__}: {error}",
            remedy=remedy,
        )
    return Finding(section=section, subject=subject, state="ok", detail=detail)


def _print(findings: list[Finding], healthy: bool) -> None:
    marks = {"ok": "ok     ", "missing": "MISSING", "note": "-      "}
    width = max(len(finding.subject) for finding in findings)
    for section in dict.fromkeys(finding.section for finding in findings):
        print(section)
        for finding in findings:
            if finding.section == section:
                print(f"  {marks[finding.state]} {finding.subject:{width}}  {finding.detail}")
                if finding.remedy:
                    print(f"  {'':7} {'':{width}}  get it with: {finding.remedy}")
    print(
        "\nready: try `omnistage demo`" if healthy else "\nsomething needed is missing, see above"
    )
