"""Loaded pipelines, each once a session: ours, and diffusers' own beside it."""

from __future__ import annotations

from functools import cache

import pytest

from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver
from tests.diffusion.reference import reference_pipeline


@pytest.fixture(scope="session")
def driver():
    """`driver(family)`: the runtime with that family's checkpoint, default configuration."""
    return cache(lambda name: Driver(checkpoint(name)))


@pytest.fixture(scope="session")
def reference():
    """`reference(family)`: the pipeline that `from_pretrained` makes of the same checkpoint."""
    return cache(lambda name: reference_pipeline(checkpoint(name)))
