"""What `plan` prints."""

from __future__ import annotations

from dataclasses import fields

from omnistage.config.deploy import parse_deploy
from omnistage.config.describe import describe, describe_origins
from omnistage.config.overrides import Overrides
from omnistage.config.resolved import EngineLimits, ResolvedStage
from tests.config.pipelines import resolve, two_stage_pipeline


def test_every_resolved_value_is_shown() -> None:
    text = describe(resolve(two_stage_pipeline(), options={"an_option": 1}, tensor_parallel_size=2))
    for name in (f.name for f in fields(ResolvedStage)):
        if name not in ("stage", "model_path", "devices", "parallel", "num_replicas"):
            assert name in text or name == "default_sampling_params", name
    for name in (f.name for f in fields(EngineLimits)):
        assert name in text
    assert "1 replica(s) of 2 rank(s) (tensor_parallel_size 2) on cpu, cpu" in text
    assert "stage 1    painter: diffusion, from stage 0, image to the client" in text


def test_origins_name_the_layer() -> None:
    text = describe_origins(
        two_stage_pipeline(options={1: {"a": 1}}),
        parse_deploy("max_num_seqs: 2\nlb_policy: random", origin="mine.yaml"),
        Overrides.from_flags([("stage-1.max-num-seqs", "3")]),
    )
    assert text.splitlines() == [
        "lb_policy = 'random'   (mine.yaml)",
        "stage 0: max_num_seqs = 2   (mine.yaml)",
        "stage 1: options = {'a': 1}   (model)",
        "stage 1: max_num_seqs = 3   (command line)",
    ]


def test_nothing_but_defaults() -> None:
    assert describe_origins(two_stage_pipeline(), None, None) == ""
