"""Previews turn step mode on, in what is resolved and shown; what contradicts that is refused."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import UnsupportedCombinationError
from tests.config.test_resolve import resolve


@pytest.mark.invariant("CONFIG-INV-101")
def test_previews_turn_step_mode_on() -> None:
    (stage,) = resolve(accelerators=(), diffusion_streaming_output=True).stages
    assert stage.step_execution
    (stage,) = resolve(accelerators=(), diffusion_streaming_output=False).stages
    assert not stage.step_execution


def test_previews_without_step_mode_are_refused() -> None:
    with pytest.raises(UnsupportedCombinationError, match="needs step_execution"):
        resolve(accelerators=(), diffusion_streaming_output=True, step_execution=False)
