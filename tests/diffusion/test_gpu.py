"""On a CUDA device: the same bits as diffusers there, and the settings that only matter there."""

from __future__ import annotations

import gc

import pytest
import torch

from omnistage.attention.joint import RealFrequencies
from omnistage.contracts.errors import RequestCancelledError
from tests.checkpoints import FAMILIES, checkpoint
from tests.diffusion.crowd import Crowd, cancel_many
from tests.diffusion.driver import Driver, RecordingContext
from tests.diffusion.reference import reference_images, reference_pipeline, request_of, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"
SEED = 7


@pytest.mark.parametrize("name", ["qwen_image", "flux", "sd15", "pixart_sigma"])
@pytest.mark.parametrize("output_type", ["pil", "pt", "latent"])
def test_output_equals_diffusers_on_the_device(name, output_type):
    call = FAMILIES[name].call
    ours = Driver(checkpoint(name), devices=(DEVICE,))
    theirs = reference_images(
        reference_pipeline(checkpoint(name)).to(DEVICE), call, SEED, output_type
    )
    result = ours.run(request_of(call, SEED, output_type))
    expected = theirs.cpu() if isinstance(theirs, torch.Tensor) else theirs
    assert same_bits(result.tensors["images"], expected)
    assert result.fields["peak_memory_mb"] > 0
    with pytest.raises(RequestCancelledError):
        ours.run(request_of(call, SEED, output_type), RecordingContext(cancel_at=4))
    again = ours.run(request_of(call, SEED, output_type)).tensors["images"]
    assert same_bits(again, expected)


def test_noise_comes_from_the_device_only_when_asked():
    call = FAMILIES["sd15"].call
    ours = Driver(checkpoint("sd15"), devices=(DEVICE,))
    plain = ours.run(request_of(call, SEED, "pil")).tensors["images"]
    on_device = request_of({**call, "generator_device": "cuda"}, SEED, "pil")
    assert not same_bits(ours.run(on_device).tensors["images"], plain)


KEPT_BYTES = 2 * RealFrequencies.max_entries * 4096
"""What the bounded cache of rotations may add; a thousand leaks are more."""


def allocated_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.invariant("DIFF-RUNTIME-INV-051")
def test_a_thousand_random_cancels_leave_the_memory_flat():
    crowd = Crowd(
        "qwen_image",
        devices=(DEVICE,),
        step_execution=True,
        diffusion_streaming_output=True,
        enforce_eager=True,
        max_num_seqs=8,
    )
    cancel_many(crowd, 100, seed=0)
    before = allocated_bytes()
    assert cancel_many(crowd, 1000, seed=1) >= 100
    assert crowd.steps.num_states == 0
    assert crowd.scheduler.counts() == (0, 0)
    assert allocated_bytes() - before <= KEPT_BYTES
