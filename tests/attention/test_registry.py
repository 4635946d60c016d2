"""Choosing attention kernels."""

from __future__ import annotations

import pytest

from omnistage.attention.registry import BACKENDS, DEFAULT, apply_backend, select_backend
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError


@pytest.mark.invariant("ATTN-INV-001")
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_default_runs_everywhere(device):
    assert select_backend(device).name == DEFAULT
    assert select_backend(device, DEFAULT).diffusers_name is None


@pytest.mark.invariant("ATTN-INV-001")
def test_what_a_device_cannot_run_is_refused_not_replaced():
    for name, backend in BACKENDS.items():
        assert select_backend("cuda:1", name) is backend
    with pytest.raises(UnsupportedCombinationError, match="allowed there: sdpa, math"):
        select_backend("cpu", "cudnn")
    with pytest.raises(ConfigurationError, match="allowed on cpu: sdpa, math"):
        select_backend("cpu", "flashy")


@pytest.mark.invariant("ATTN-INV-002")
def test_names_are_those_of_the_library_and_the_default_touches_nothing():
    from diffusers.models.attention_dispatch import AttentionBackendName

    known = {name.value for name in AttentionBackendName}
    assert {backend.diffusers_name for backend in BACKENDS.values()} - {None} <= known
    calls = []

    class Module:
        set_attention_backend = staticmethod(calls.append)

    for name in BACKENDS:
        apply_backend(Module, BACKENDS[name])
    assert calls == [backend.diffusers_name for backend in BACKENDS.values()][1:]
