"""Stages of several ranks in step mode, and what one process makes of the same requests."""

from __future__ import annotations

from typing import Any

from omnistage.config.resolved import ParallelConfig, ResolvedStage
from omnistage.contracts.payloads import StageData
from omnistage.contracts.tensors import host_tensor
from omnistage.models.registry import find_pipeline
from tests.checkpoints import checkpoint
from tests.diffusion.crowd import Crowd
from tests.diffusion.driver import diffusion_request, diffusion_stage
from tests.parallel.bench import ReplicaBench

SIZE = {"height": 32, "width": 32, "output_type": "np"}


def step_stage(family: str, parallel: ParallelConfig, **changes: Any) -> ResolvedStage:
    folder = checkpoint(family)
    return diffusion_stage(
        folder,
        parallel=parallel,
        devices=("cpu",) * parallel.world_size,
        **{
            "options": find_pipeline(str(folder)).pipeline.options.get(0, {}),
            "step_execution": True,
            "diffusion_streaming_output": True,
            "max_num_seqs": 3,
            **changes,
        },
    )


def pixels(answer: Any) -> Any:
    return host_tensor(answer.tensors["images"]).numpy()


def alone(crowd: Crowd, name: str, prompt: str, **params: Any) -> Any:
    expected = pixels(crowd.alone(diffusion_request(prompt, request_id=name, **params)))
    assert expected.std() > 0.05, "a reference that is near zero proves nothing"
    return expected


def finals(bench: ReplicaBench, count: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The next `count` ends (see `ReplicaBench.answers`), and the previews that came before."""
    ends: dict[str, Any] = {}
    previews: dict[str, list[Any]] = {}
    while len(ends) < count:
        ((name, answer),) = bench.answers(1).items()
        if isinstance(answer, StageData) and "partial_image_index" in answer.fields:
            previews.setdefault(name, []).append(answer)
        else:
            ends[name] = answer
    return ends, previews


def places(bench: ReplicaBench) -> dict[str, int]:
    """Which lane serves each request that is at the stage now."""
    lanes = bench.replica._scheduler.lanes
    return {key[0]: place for place, lane in enumerate(lanes) for key in lane._active}
