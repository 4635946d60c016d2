"""A request that fails takes nothing with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OutOfMemoryError,
    RequestCancelledError,
    StageLostError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from tests.checkpoints import FAMILIES, checkpoint
from tests.diffusion.driver import Driver, RecordingContext, diffusion_stage
from tests.diffusion.reference import request_of, same_bits

SEED = 7
CALL = FAMILIES["qwen_image"].call


@pytest.fixture
def qwen(driver):
    """The shared runtime; whatever the test did to it, the next picture must be right."""
    ours = driver("qwen_image")
    expected = ours.run(request_of(CALL, SEED, None)).tensors["images"]
    yield ours
    assert same_bits(ours.run(request_of(CALL, SEED, None)).tensors["images"], expected)


@pytest.fixture
def breaking(qwen):
    """`breaking(module, call_number, error)`: that forward of the module raises."""
    handles = []

    def install(module, number, error):
        calls = iter(range(1000))

        def hook(*_):
            if next(calls) == number:
                raise error

        handles.append(module.register_forward_pre_hook(hook))

    yield install
    for handle in handles:
        handle.remove()


@pytest.mark.invariant("DIFF-RUNTIME-INV-016")
@pytest.mark.parametrize("place", ["text_encoder", "transformer", "decoder"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried …"),
    ],
    ids=["device", "host"],
)
def test_out_of_memory_fails_the_request_only(place, error, qwen, breaking):
    pipeline = qwen.pipeline
    module = pipeline.vae.decoder if place == "decoder" else getattr(pipeline, place)
    breaking(module, 0, error)
    emission = qwen.emission(request_of(CALL, SEED, None))
    assert isinstance(emission.error, OutOfMemoryError)
    assert "GiB" not in emission.error.message


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_schedule_that_does_not_exist_is_the_callers(qwen):
    """Qwen-Image's schedule for one step is NaN, in diffusers too."""
    emission = qwen.emission(request_of(CALL | {"num_inference_steps": 1}, SEED, None))
    assert isinstance(emission.error, InvalidRequestError)
    assert emission.error.param == "num_inference_steps"
    assert "no schedule of 1 step(s); ask for more" in emission.error.message


def test_a_fault_inside_the_model_is_internal_and_tells_only_the_log(qwen, breaking):
    breaking(qwen.pipeline.transformer, 2, KeyError("/secret/path"))
    emission = qwen.emission(request_of(CALL, SEED, None))
    assert type(emission.error) is InternalError
    assert "/secret/path" not in emission.error.message
    assert "/secret/path" in emission.error.detail


def test_a_fault_of_the_device_costs_the_replica(qwen, breaking):
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    breaking(qwen.pipeline.transformer, 0, error)
    latents = torch.zeros(1, 6, 16)
    request = request_of({**CALL, "latents": latents}, SEED, None)
    assert type(qwen.emission(request).error) is StageLostError


def test_a_value_error_after_denoising_began_is_no_fault_of_the_caller(qwen, breaking):
    breaking(qwen.pipeline.transformer, 2, ValueError("inside"))
    assert type(qwen.emission(request_of(CALL, SEED, None)).error) is InternalError


@pytest.mark.invariant("DIFF-RUNTIME-INV-017")
@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_a_decoder_that_gives_nan_is_an_error_not_a_black_picture(output_type, qwen):
    weight = qwen.pipeline.vae.decoder.conv_out.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[0] = float("nan")
    try:
        error = qwen.emission(request_of(CALL, SEED, output_type)).error
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert type(error) is InternalError
    assert "NaN" in error.message


def test_latents_that_are_nan_are_an_error(qwen):
    weight = qwen.pipeline.transformer.proj_out.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[0] = float("inf")
    try:
        error = qwen.emission(request_of(CALL, SEED, "latent")).error
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert "NaN" in error.message


@pytest.mark.invariant("DIFF-RUNTIME-INV-003")
def test_a_cancelled_request_keeps_no_tensor_alive(qwen):
    seen = []

    def note(module, args, kwargs):
        seen.append(weakref.ref(kwargs["hidden_states"]))

    handle = qwen.pipeline.transformer.register_forward_pre_hook(note, with_kwargs=True)
    context = RecordingContext()
    qwen.run(request_of(CALL, SEED, None), context)
    last_step = context.kinds_at_checkpoints.index("decode") - 1
    try:
        emission = qwen.emission(
            request_of(CALL, SEED, None), RecordingContext(cancel_at=last_step)
        )
    finally:
        handle.remove()
    assert isinstance(emission.error, RequestCancelledError)
    gc.collect()
    assert seen
    assert [one for one in seen if one() is not None] == []


def test_an_unknown_command_is_refused(qwen):
    command = Command(
        name="sing",
        identities=(RequestIdentity(request_id="r"),),
        data=StageData(modality=Modality.TEXT),
    )
    with pytest.raises(InternalError, match="sing"):
        qwen.executor.execute(command, RecordingContext())


def test_control_calls_are_refused_by_name(qwen):
    with pytest.raises(InvalidRequestError, match="reset"):
        qwen.executor.control("reset", {})


def test_ranks_that_a_stage_cannot_use_are_refused():
    from omnistage.diffusion.runtime import DiffusionRuntime

    stage = diffusion_stage("/nowhere", parallel=ParallelConfig(rank_parallel_size=2))
    with pytest.raises(UnsupportedCombinationError, match="divides no work by itself"):
        DiffusionRuntime.scheduler(stage)


def test_close_frees_the_model_and_may_be_repeated():
    ours = Driver(checkpoint("pixart_sigma"))
    weights = weakref.ref(ours.pipeline.transformer)
    ours.executor.close()
    ours.executor.close()
    gc.collect()
    assert weights() is None
    emission = ours.emission(request_of(FAMILIES["pixart_sigma"].call, SEED, None))
    assert "closed" in emission.error.message


def test_load_describes_the_pipeline_and_reports_progress():
    ours = Driver(checkpoint("pixart_sigma"))
    assert ours.description["pipeline_class"] == "PixArtSigmaPipeline"
    assert ours.description["components"]["transformer"] == "PixArtTransformer2DModel"
    assert ours.description["dtype"] == "float32"
    assert ours.reports[-1][1] == 1.0
