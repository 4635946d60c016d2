"""The stage's `offload` reaches the memory layer; what cannot be is refused, never ignored."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.diffusion.offloading import check_offload
from omnistage.diffusion.runtime import DiffusionRuntime
from tests.config.pipelines import resolve

STRATEGIES = ["model", "layerwise", "distributed-layerwise"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cpu_refuses_before_anything_is_loaded(strategy: str) -> None:
    (stage,) = resolve(offload=strategy, device="cpu").stages
    with pytest.raises(UnsupportedCombinationError, match=f"offload '{strategy}' on cpu: .*cuda"):
        DiffusionRuntime.scheduler(stage)


@pytest.mark.parametrize("strategy", ["auto", "none"])
def test_a_cpu_takes_what_moves_nothing(strategy: str) -> None:
    check_offload(resolve(offload=strategy, device="cpu").stages[0])
