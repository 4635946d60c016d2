"""Offload through the whole engine: `Omni` in one process, on a device whose copies run late."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from omnistage import Omni, OmniDiffusionSamplingParams
from omnistage.contracts.errors import OmniError
from tests.checkpoints import checkpoint
from tests.memory.offload.fake_device import late_device

PROMPTS = ["a red cat", "a blue house", "a dog", "a tree at night"]


def pictures(**settings) -> list[np.ndarray]:
    params = OmniDiffusionSamplingParams(height=32, width=32, num_inference_steps=3, seed=4)
    folder = str(checkpoint("qwen_image"))
    with Omni(folder, device="cpu", process="inline", max_num_seqs=4, **settings) as omni:
        outputs = omni.generate(PROMPTS, params)
    return [np.asarray(output.images[0]) for output in outputs]


@pytest.mark.invariant("DIFF-RUNTIME-INV-070")
@pytest.mark.parametrize("mode", [{}, {"step_execution": True}])
@pytest.mark.parametrize("switch", ["enable_cpu_offload", "enable_layerwise_offload"])
def test_pictures_are_the_same(switch, mode):
    with late_device() as platform:
        plain = pictures(**mode)
        assert platform.uploads == 0
        assert all(one.std() > 5 for one in plain)
        assert len({one.tobytes() for one in plain}) == len(PROMPTS)
        offloaded = pictures(**mode, **{switch: True})
    assert platform.uploads > 0
    assert platform.locked == {}
    for one, other in zip(offloaded, plain, strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 1, "batches may differ"


def test_the_log_says_what_is_where(caplog):
    with late_device(), caplog.at_level(logging.INFO, "omnistage"):
        pictures(offload="layerwise")
    assert any("streamed from" in record.getMessage() for record in caplog.records)


def test_a_plain_cpu_refuses_before_anything_is_loaded():
    with pytest.raises(OmniError, match=r"offload 'layerwise' on cpu: .*same; leave it out"):
        pictures(enable_layerwise_offload=True)
