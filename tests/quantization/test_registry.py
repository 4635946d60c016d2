"""No precision but the one asked for."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.quantization.registry import PLANNED, resolve_method


@pytest.mark.invariant("QUANT-INV-002")
@pytest.mark.parametrize("name", PLANNED)
def test_methods_to_come_are_refused_as_such(name):
    with pytest.raises(UnsupportedCombinationError, match=f"{name}' is not there yet.* none, fp8"):
        resolve_method(name)


@pytest.mark.invariant("QUANT-INV-002")
def test_unknown_methods_name_the_nearest():
    with pytest.raises(ConfigurationError, match="'fp9' is unknown; did you mean 'fp8'"):
        resolve_method("fp9")
    with pytest.raises(ConfigurationError, match=r"allowed: none, fp8$"):
        resolve_method("zzzz")


@pytest.mark.parametrize("name", ["fp8", "FP8", " Fp8", "float8", "FP8-E4M3", "fp8_e4m3"])
def test_methods_have_aliases_in_any_case(name):
    assert resolve_method(name) == "fp8"


def test_none_is_no_method():
    assert resolve_method("None") is None


def test_hyphens_and_underscores_are_one():
    with pytest.raises(UnsupportedCombinationError, match="auto-round"):
        resolve_method("auto-round")
    with pytest.raises(UnsupportedCombinationError, match="AUTO_ROUND"):
        resolve_method("AUTO_ROUND")
