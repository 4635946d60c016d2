"""Budgets and offload: what exists, and how the rest is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omnistage.contracts.errors import ConfigurationError
from omnistage.memory.budget import MemoryBudget
from omnistage.memory.offload.base import STRATEGIES, check_strategy
from omnistage.memory.offload.none import NoOffload


@pytest.mark.invariant("MEM-INV-001")
def test_a_budget_counts_each_device_alone():
    budget = MemoryBudget.of(1.0, "cuda:0")
    budget.check({"cuda:0": 2**30, "cpu": 2**40}, what="it")
    with pytest.raises(ConfigurationError, match=r"it needs 1\.50 GiB .* on cuda:0.* 1\.00 GiB"):
        budget.check({"cuda:0": 3 * 2**29, "cpu": 0}, what="it")


@pytest.mark.invariant("MEM-INV-001")
def test_without_a_number_nothing_is_limited():
    MemoryBudget.of(None, "cpu").check({"cpu": 2**60}, what="it")


@pytest.mark.invariant("OFFLOAD-INV-001")
def test_none_owns_a_pipeline_and_gives_it_back():
    backend = NoOffload()
    pipeline = object()
    backend.enable(pipeline)
    assert backend.is_enabled
    with pytest.raises(ConfigurationError, match="owns a pipeline already"):
        backend.enable(object())
    backend.disable()
    backend.disable()
    assert not backend.is_enabled


@pytest.mark.invariant("OFFLOAD-INV-001")
def test_an_unknown_strategy_names_the_nearest():
    assert [check_strategy(name) for name in STRATEGIES] == list(STRATEGIES)
    with pytest.raises(ConfigurationError, match="nearest: layerwise"):
        check_strategy("layer-wise")


def test_modules_are_importable_without_torch():
    code = """
import sys, pkgutil, importlib
for name in ("attention.registry", "quantization.config"):  # kernels and layers are torch's
    importlib.import_module(f"omnistage.{name}")
for package in ("memory", "parallel"):
    found = importlib.import_module(f"omnistage.{package}")
    for module in pkgutil.iter_modules(found.__path__, f"omnistage.{package}."):
        importlib.import_module(module.name)
assert not {"torch", "diffusers", "transformers", "accelerate"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
