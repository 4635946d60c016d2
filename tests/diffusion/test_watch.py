"""Cancellation, progress and phases of a pipeline call, seen from outside."""

from __future__ import annotations

from functools import wraps

import pytest

from omnistage.contracts.errors import RequestCancelledError
from tests.checkpoints import FAMILIES
from tests.diffusion.driver import RecordingContext
from tests.diffusion.reference import request_of, same_bits

SEED = 7
SLOW = {"qwen_image_edit", "hidream"}


def hook_count(pipeline) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks)
        for part in pipeline.components.values()
        if hasattr(part, "modules")
        for module in part.modules()
    )


@pytest.fixture
def count_steps(monkeypatch):
    """`count_steps(scheduler)` gives a list that grows with each of its steps."""

    def install(scheduler):
        calls = []
        step = scheduler.step

        @wraps(step)  # pipelines look at its signature
        def counted(*args, **kwargs):
            calls.append(None)
            return step(*args, **kwargs)

        monkeypatch.setattr(scheduler, "step", counted)
        return calls

    return install


@pytest.mark.invariant("DIFF-RUNTIME-INV-013")
@pytest.mark.invariant("DIFF-RUNTIME-INV-012")
@pytest.mark.parametrize("name", FAMILIES)
def test_cancel_at_every_point_and_the_next_picture_is_right(name, driver, count_steps):
    ours = driver(name)
    scheduler_steps = count_steps(ours.pipeline.scheduler)
    call = FAMILIES[name].call
    whole = RecordingContext()
    expected = ours.run(request_of(call, SEED, "pil"), whole).tensors["images"]
    hooks = hook_count(ours.pipeline)  # transformers adds lasting ones of its own in the first run
    kinds = whole.kinds_at_checkpoints
    assert {"step", "decode"} <= set(kinds)
    total = len(scheduler_steps)
    assert whole.steps == [(step, total) for step in range(total + 1)]
    points = range(whole.checkpoints)
    if name in SLOW:
        points = [kinds.index("step"), kinds.index("decode")]
    for point in points:
        context = RecordingContext(cancel_at=point)
        with pytest.raises(RequestCancelledError):
            ours.run(request_of(call, SEED, "pil"), context)
        assert context.checkpoints == point + 1, "it went on after the cancellation"
        assert hook_count(ours.pipeline) == hooks
    again = ours.run(request_of(call, SEED, "pil")).tensors["images"]
    assert same_bits(again, expected)


def test_two_passes_of_one_step_count_once(driver):
    context = RecordingContext()
    call = FAMILIES["qwen_image"].call
    driver("qwen_image").run(request_of(call, SEED, "pil"), context)
    steps = call["num_inference_steps"]
    assert context.kinds_at_checkpoints.count("step") == 2 * steps
    assert context.steps[-1] == (steps, steps)


def test_phases_add_up(driver):
    emission = driver("flux").emission(request_of(FAMILIES["flux"].call, SEED, "pil"))
    assert set(emission.timings_s) == {"preprocess", "exec", "postprocess"}
    assert all(seconds > 0 for seconds in emission.timings_s.values())
    assert "timings_s" not in emission.data.fields
