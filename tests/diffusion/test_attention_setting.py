"""The attention kernel that a deployment chooses reaches the denoiser, or is refused at load."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.diffusion import executor
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver


@pytest.mark.invariant("ATTN-INV-001")
@pytest.mark.parametrize(
    ("name", "error"), [("flash", UnsupportedCombinationError), ("flsh", ConfigurationError)]
)
def test_what_the_device_cannot_run_is_refused(name: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        Driver(checkpoint("sd3"), options={"attention_backend": name})


def test_the_choice_reaches_the_denoiser(monkeypatch: pytest.MonkeyPatch) -> None:
    """`diffusers` keeps a backend for its whole process, so that it is not really set here."""
    applied: list[tuple[str, str]] = []
    monkeypatch.setattr(
        executor,
        "apply_backend",
        lambda m, backend: applied.append((type(m).__name__, backend.name)),
    )
    Driver(checkpoint("sd3"), options={"attention_backend": "math"})
    assert applied == [("SD3Transformer2DModel", "math")]
