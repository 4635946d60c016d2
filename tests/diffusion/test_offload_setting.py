"""The stage's `offload` reaches the memory layer; what is not there is refused, never ignored."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.diffusion.runtime import DiffusionRuntime
from tests.config.pipelines import resolve


@pytest.mark.parametrize("strategy", ["model", "layerwise", "distributed-layerwise"])
def test_an_offload_strategy_that_is_not_there_is_refused(strategy: str) -> None:
    (stage,) = resolve(offload=strategy, device="cpu").stages
    with pytest.raises(UnsupportedCombinationError, match=f"offload '{strategy}' is not there"):
        DiffusionRuntime.executor(stage, 0, 1)
