"""No precision but the one asked for."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.quantization.registry import PLANNED, resolve_quantization


@pytest.mark.invariant("QUANT-INV-002")
def test_full_precision_needs_no_method():
    assert resolve_quantization(None) is None
    assert resolve_quantization("none") is None


@pytest.mark.invariant("QUANT-INV-002")
@pytest.mark.parametrize("name", PLANNED)
def test_methods_to_come_are_refused_as_such(name):
    with pytest.raises(UnsupportedCombinationError, match=f"{name}' is not there yet"):
        resolve_quantization(name)


@pytest.mark.invariant("QUANT-INV-002")
def test_unknown_methods_list_the_known_ones():
    with pytest.raises(ConfigurationError, match="known: none, fp8"):
        resolve_quantization("fp9")
