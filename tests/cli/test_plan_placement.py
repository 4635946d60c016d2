"""`omnistage plan` of diffusion models: where weights would live, also on absent devices."""

from __future__ import annotations

import json
import re

import pytest

from omnistage.cli.main import main
from tests.checkpoints import checkpoint


@pytest.fixture(scope="module")
def model():
    return str(checkpoint("qwen_image"))


def planned(capsys, *words):
    code = main(["plan", *words])
    out = capsys.readouterr()
    return code, out.out + out.err


def placed(capsys, *words):
    code, out = planned(capsys, *words, "--json")
    assert code == 0, out
    return json.loads(out)["placements"]["0"]


def test_a_placement_with_its_peaks_is_printed(model, capsys):
    code, out = planned(capsys, model, "--device-memory-gib", "8", "--link-gib-s", "50")
    assert code == 0
    assert "load plan of stage 0" in out
    assert "placement: offload none (memory auto)" in out
    for phase in ("encode", "denoise", "decode"):
        assert f"{phase} " in out.partition("predicted peak on the device")[2]
    assert "a denoising step: " in out
    assert "link 50.0 GiB/s, assumed; as if on a GPU of 8 GiB" in out


def test_peaks_follow_the_shape(model, capsys):
    device = ("--device-memory-gib", "8")
    small = placed(capsys, model, *device, "--size", "256x256")["prediction"]
    large = placed(capsys, model, *device, "--height", "512", "--width", "512")["prediction"]
    assert small["phases_bytes"]["denoise"] < large["phases_bytes"]["denoise"]
    assert small["phases_bytes"]["decode"] < large["phases_bytes"]["decode"]
    assert small["step_s"] < large["step_s"]
    assert large["device_peak_bytes"] == max(large["phases_bytes"].values())


def test_a_strategy_that_is_asked_for_on_a_device_that_is_not_here(model, capsys):
    words = (model, "--device-memory-gib", "8", "--size", "64x64", "--offload", "layerwise")
    found = placed(capsys, *words, "--memory", "minimal")
    assert found["strategy"] == "layerwise"
    transformer = found["components"]["transformer"]
    assert transformer["residency"] == "streamed"
    assert len(transformer["streamed_blocks"]) == 2
    assert found["components"]["vae"]["residency"] == "resident"


def test_what_cannot_work_is_refused_with_the_nearest_that_works(model, capsys):
    code, out = planned(capsys, model, "--device-memory-gib", "8", "--memory-budget-gib", "0.01")
    assert code == 2
    assert "QwenImageTransformer2DModel" in out
    assert "nearest that works: memory_budget_gib " in out
    nearest = out.partition("nearest that works: memory_budget_gib ")[2].split()[0]
    assert placed(capsys, model, "--device-memory-gib", "8", "--memory-budget-gib", nearest)


def test_a_device_that_is_too_small_for_anything_is_told_one_that_is_not(model, capsys):
    for too_small in ("0.1", "0.65"):
        code, out = planned(capsys, model, "--device-memory-gib", too_small, "--size", "64x64")
        assert code == 2
        assert "the budget is" in out
        nearest = out.partition("nearest that works: a device of ")[2].split()[0]
        assert placed(capsys, model, "--device-memory-gib", nearest, "--size", "64x64")


def test_a_link_without_its_device_is_refused(model, capsys):
    code, out = planned(capsys, model, "--link-gib-s", "50")
    assert code == 2
    assert "add --device-memory-gib" in out


def test_this_machine_keeps_all_resident(model, capsys):
    found = placed(capsys, model, "--device", "cpu", "--size", "64x64")
    assert found["strategy"] == "none"
    assert found["prediction"]["locked_bytes"] == 0


def test_without_offload_a_budget_is_one_of_weights_as_at_start(model, capsys):
    words = (model, "--device", "cpu", "--size", "64x64", "--memory-budget-gib")
    assert placed(capsys, *words, "0.0009")["strategy"] == "none"
    code, out = planned(capsys, *words, "0.0001")
    assert code == 2
    assert "raise memory_budget_gib to at least" in out


def test_quantized_blocks_are_planned_with_their_bytes(model, capsys):
    words = (model, "--device-memory-gib", "8", "--offload", "layerwise", "--memory", "minimal")
    plain = placed(capsys, *words, "--dtype", "bfloat16")["components"]["transformer"]
    quantized = placed(capsys, *words, "--dtype", "bfloat16", "--quantization", "fp8")
    assert quantized["components"]["transformer"]["weight_bytes"] < plain["weight_bytes"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--size", "0x0"), "--size must be like"),
        (("--size", "64x64", "--height", "64"), "without --height"),
        (("--default-sampling-params", '{"height": -32}'), "height .* is -32.* positive"),
        (("--default-sampling-params", '{"num_inference_steps": 0}'), "num_inference_steps .* 0"),
    ],
)
@pytest.mark.parametrize("device", [("--device", "cpu"), ("--device-memory-gib", "8")])
def test_a_shape_that_cannot_be_is_refused_on_every_device(model, capsys, device, flags, words):
    code, out = planned(capsys, model, *device, *flags)
    assert code != 0
    assert re.search(words, out)
    assert "tried all the same" not in out


def test_what_a_start_would_refuse_is_refused_for_an_absent_device_too(model, capsys):
    for words in (("--tensor-parallel-size", "2"), ("--quantization", "nvfp4")):
        code, out = planned(capsys, model, "--device-memory-gib", "8", *words)
        assert code == 2
        assert "is not there yet; allowed: " in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rank-parallel-size", "2"), "divides no work by itself"),
        (("--request-batch-max-wait-ms", "5"), "has no effect with max_num_seqs=1"),
    ],
)
def test_what_a_runtime_refuses_is_refused_wherever_it_would_run(model, capsys, flags, words):
    chosen = ("--offload", "layerwise")
    code, out = planned(capsys, model, "--device-memory-gib", "8", *chosen, *flags)
    assert code == 2
    assert words in out


def test_who_copies_and_from_where_is_said(model, capsys):
    words = (model, "--device-memory-gib", "8", "--size", "64x64", "--memory", "minimal")
    words += ("--offload", "distributed-layerwise", "--data-parallel-size", "2")
    code, shared = planned(capsys, *words)
    assert code == 0
    assert "a share by each of 2 ranks" in shared
    assert "streamed blocks lie in the checkpoint's files" in shared
    code, own = planned(capsys, *words, "--dlo-no-use-allgather", "--dlo-runtime-cache", "on")
    assert code == 0
    assert "by each rank all of them" in own
    assert "streamed blocks lie in the runtime cache" in own
