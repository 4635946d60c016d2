"""The examination of an installation."""

from __future__ import annotations

import json

import pytest

from omnistage.cli import doctor, facts
from omnistage.cli.doctor import examine
from omnistage.cli.main import main


def test_everything_is_looked_at() -> None:
    findings = list(examine(quick=True))
    sections = {finding.section for finding in findings}
    assert sections == {"system", "packages", "optional packages", "devices", "models"}
    names = {finding.subject for finding in findings}
    assert {"python", "torch", "diffusers", "transformers", "cpu", "cuda"} <= names
    packages = [finding for finding in findings if finding.section == "packages"]
    assert len(packages) == len(facts.required_packages()) >= 15
    assert all(finding.state == "ok" for finding in packages)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--quick", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["healthy"] else 1)
    assert {finding["state"] for finding in report["findings"]} <= {"ok", "note", "missing"}


def test_what_is_missing_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = facts.package("no-such-package-anywhere>=2")
    old = facts.package("numpy>=9999")
    assert (absent.installed, absent.satisfied) == (None, False)
    assert not old.satisfied
    monkeypatch.setattr(doctor, "required_packages", lambda: [absent, old])
    assert main(["doctor", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "MISSING no-such-package-anywhere" in out
    assert "get it with: pip install 'no-such-package-anywhere>=2'" in out
    assert "get it with: pip install 'numpy>=9999'" in out
    assert "something needed is missing" in out


def test_a_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnistage.platforms.cpu import CpuPlatform

    def broken(self: CpuPlatform, device: str) -> None:
        raise ImportError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(CpuPlatform, "capabilities", broken)
    found = [finding for finding in examine() if finding.section == "kernels"]
    cpu = next(finding for finding in found if finding.subject == "cpu")
    assert cpu.state == "missing"
    assert "libtorch.so" in cpu.detail
    assert cpu.remedy == "pip install --force-reinstall torch"


def test_kernels_are_found_by_running_them() -> None:
    cpu = next(f for f in examine() if f.section == "kernels" and f.subject == "cpu")
    assert cpu.state == "ok"
    assert "attention" in cpu.detail
    assert "math" in cpu.detail
