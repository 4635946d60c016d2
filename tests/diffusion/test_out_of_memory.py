"""Out of memory: a batch is halved until it fits, guidance branches go apart, then one fails."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from contextlib import ExitStack, contextmanager

import pytest
import torch

from omnistage.contracts.errors import OutOfMemoryError
from omnistage.diffusion.batch_limits import BatchLimits
from tests.diffusion.crowd import Crowd, max_difference, replaced
from tests.diffusion.driver import diffusion_request

TOLERANCE = 1e-5
COUNT = 8


def request(name: str, *, guided: bool = False, steps: int = 3, **changes):
    return diffusion_request(
        f"number {name}",
        **{
            "negative_prompt": "bad" if guided else None,
            "true_cfg_scale": 3.0 if guided else 1.0,
            "request_id": name,
            "height": 32,
            "width": 32,
            "num_inference_steps": steps,
            "seed": 5,
            "output_type": "np",
            **changes,
        },
    )


def requests(**changes):
    return {name: request(name, **changes) for name in (f"r{i}" for i in range(COUNT))}


@pytest.fixture(scope="module")
def crowd():
    return Crowd(
        "qwen_image",
        step_execution=True,
        diffusion_streaming_output=True,
        max_num_seqs=COUNT,
    )


@pytest.fixture(scope="module")
def alone(crowd):
    return functools.cache(lambda name, guided=False: crowd.alone(request(name, guided=guided)))


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class Memory:
    """Room for `rows` at a time in one of the family's calls. `sizes` are those that were tried."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.sizes: list[int] = []

    def need(self, rows: int) -> None:
        self.sizes.append(rows)
        if rows > self.rows:
            raise out_of_memory()

    def for_prompts(self, original):
        def encode(prompts):
            self.need(len(prompts))
            return original(prompts)

        return encode

    def for_steps(self, original):
        def denoise(**inputs):
            self.need(len(inputs["hidden_states"]))
            return original(**inputs)

        return denoise

    def for_pictures(self, original):
        def decode(latents, states):
            self.need(len(latents))
            return original(latents, states)

        return decode


@contextmanager
def room(crowd, call: str, rows: int):
    memory = Memory(rows)
    wraps = {
        "encode": memory.for_prompts,
        "denoiser": memory.for_steps,
        "decode": memory.for_pictures,
    }
    with replaced(crowd.family, call, wraps[call]):
        yield memory


@pytest.mark.invariant("DIFF-RUNTIME-INV-046")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("call", "command"), [("encode", "encode"), ("denoiser", "step"), ("decode", "decode")]
)
def test_a_batch_that_does_not_fit_is_halved_until_it_does(call, command, rows, crowd, alone):
    expected = {name: alone(name) for name in requests()}
    with room(crowd, call, rows) as memory:
        outcome = crowd.run(requests())
    assert outcome.errors == {}
    for name, result in outcome.results.items():
        assert max_difference(result, expected[name]) <= TOLERANCE
    failed = [size for size in memory.sizes if size > rows]
    assert failed == [8, 4, 2][: len(failed)], "learnt once, and kept"
    assert memory.sizes[len(failed) :] == [memory.sizes[len(failed)]] * (
        len(memory.sizes) - len(failed)
    )
    assert [len(members) for members in outcome.waves(command)][: len(failed)] == failed
    assert crowd.steps.num_states == 0


@pytest.mark.invariant("DIFF-RUNTIME-INV-046")
def test_previews_that_do_not_fit_are_halved_too(crowd, alone):
    expected = {name: alone(name) for name in requests()}
    with room(crowd, "decode", 2):
        outcome = crowd.run(requests(partial_images=1))
    assert outcome.errors == {}
    assert [len(members) for members in outcome.waves("preview")] == [8, 4, 2, 2, 2, 2]
    for name, result in outcome.results.items():
        assert max_difference(result, expected[name]) <= TOLERANCE
        assert len(outcome.previews[name]) == 1


@pytest.mark.invariant("DIFF-RUNTIME-INV-016")
@pytest.mark.parametrize("call", ["encode", "denoiser", "decode"])
def test_alone_it_fails_and_leaves_nothing(call, crowd, alone):
    expected = alone("r0")
    latents = []

    def note(command):
        if command.name == "step":
            latents.append(weakref.ref(crowd.state("r0").latents))

    with room(crowd, call, 0):
        outcome = crowd.run({"r0": request("r0")}, before=note)
    error = outcome.errors["r0"]
    assert isinstance(error, OutOfMemoryError)
    assert error.status == 503
    assert "GiB" not in error.message
    assert crowd.steps.num_states == 0
    gc.collect()
    assert [one for one in latents if one() is not None] == []
    assert bool(latents) == (call != "encode")
    assert max_difference(crowd.alone(request("r0")), expected) <= TOLERANCE


@pytest.mark.invariant("DIFF-RUNTIME-INV-046")
def test_guidance_branches_that_do_not_fit_together_go_one_after_the_other(crowd, alone, caplog):
    expected = alone("r0", True)
    with room(crowd, "denoiser", 1) as memory, caplog.at_level(logging.WARNING, "omnistage"):
        outcome = crowd.run({"r0": request("r0", guided=True)})
    assert max_difference(outcome.results["r0"], expected) <= TOLERANCE
    assert memory.sizes == [2, 1, 1, 1, 1, 1, 1], "tried together once"
    said = [one.getMessage() for one in caplog.records if "branches" in one.getMessage()]
    assert len(said) == 1
    assert "r0" in said[0]
    with room(crowd, "denoiser", 2) as memory:
        crowd.run({"r0": request("r0", guided=True)})
    assert memory.sizes == [2, 2, 2], "the next of that shape tries it anew"


@pytest.mark.invariant("DIFF-RUNTIME-INV-046")
def test_a_crowd_of_guided_requests_comes_down_to_single_branches(crowd, alone):
    expected = {name: alone(name, True) for name in ("r0", "r1", "r2")}
    asked = {name: request(name, guided=True) for name in expected}
    with room(crowd, "denoiser", 1) as memory:
        outcome = crowd.run(asked)
    assert outcome.errors == {}
    assert memory.sizes[:2] == [6, 2]
    assert set(memory.sizes[2:]) == {1}
    for name, result in outcome.results.items():
        assert max_difference(result, expected[name]) <= TOLERANCE


def test_a_guided_request_whose_single_branch_does_not_fit_fails(crowd):
    with room(crowd, "denoiser", 0) as memory:
        outcome = crowd.run({"r0": request("r0", guided=True)})
    assert isinstance(outcome.errors["r0"], OutOfMemoryError)
    assert memory.sizes == [2, 1]
    assert crowd.family.in_one_batch


def test_a_fault_that_is_no_shortage_is_not_tried_branch_by_branch(crowd):
    calls = []

    def make(original):
        def denoise(**inputs):
            calls.append(len(inputs["hidden_states"]))
            raise KeyError("a fault")

        return denoise

    with replaced(crowd.family, "denoiser", make):
        outcome = crowd.run({"r0": request("r0", guided=True)})
    assert calls == [2]
    assert "a fault" in outcome.errors["r0"].detail


# request mode ---------------------------------------------------------------------------------


@contextmanager
def room_in_pipeline(crowd, rows: int):
    memory = Memory(rows)
    transformer = crowd.executor._variants.base.transformer

    def hook(module, args, kwargs):
        memory.need(len(kwargs["hidden_states"]))

    with ExitStack() as stack:
        stack.callback(transformer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield memory


@pytest.fixture(scope="module")
def fused():
    return Crowd("qwen_image", max_num_seqs=COUNT)


@pytest.mark.invariant("DIFF-RUNTIME-INV-046")
def test_request_mode_halves_a_batch_and_stays_below(fused):
    expected = {name: fused.alone(request(name)) for name in requests()}
    asked = requests() | {f"later{i}": request(f"later{i}") for i in range(4)}
    joins = {f"later{i}": 1 for i in range(4)}
    with room_in_pipeline(fused, 3):
        outcome = fused.run(asked, joins_at=joins)
    assert outcome.errors == {}
    sizes = [len(members) for members in outcome.waves("generate")]
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2]
    for name, result in expected.items():
        assert max_difference(outcome.results[name], result) <= TOLERANCE
    together = fused.run(requests())
    assert [len(members) for members in together.waves("generate")] == [8], "lifted"


@pytest.mark.invariant("DIFF-RUNTIME-INV-016")
def test_request_mode_fails_alone_and_goes_on(fused):
    with room_in_pipeline(fused, 0):
        outcome = fused.run({"r0": request("r0")})
    assert isinstance(outcome.errors["r0"], OutOfMemoryError)
    assert fused.alone(request("r0")).tensors["images"].max() > 0


# what is learnt -------------------------------------------------------------------------------


def test_a_limit_only_falls_and_leaves_with_its_shape():
    limits = BatchLimits(8)
    assert limits.of("step", "a") == 8
    limits.did_not_fit("step", "a", 8)
    limits.did_not_fit("step", "a", 3)
    limits.did_not_fit("step", "a", 8)
    assert limits.of("step", "a") == 1
    assert (limits.of("decode", "a"), limits.of("step", "b")) == (8, 8)
    limits.keep(["a", "b"])
    assert limits.of("step", "a") == 1
    limits.keep(["b"])
    assert limits.of("step", "a") == 8
