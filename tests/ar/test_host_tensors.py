"""Beginning and ending a sequence waits for nothing that a device is doing."""

from __future__ import annotations

import pytest
import torch

from omnistage.ar.host_tensors import to_device
from omnistage.ar.sampling.row_state import SamplerState
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.models.qwen3_omni.talker_rows import TalkerRows


@pytest.mark.parametrize("values", [[3, 1, 2], torch.tensor([3, 1, 2]), []])
def test_values_arrive_as_they_are(values):
    found = to_device(values, torch.int32, "cpu")
    assert found.dtype == torch.int32
    assert found.tolist() == torch.as_tensor(values).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_change_hands_without_a_wait():
    params = OmniTokenSamplingParams(min_tokens=2, presence_penalty=1.0, logit_bias={3: 1.0})
    state = SamplerState(2, 100, "cuda")
    like = torch.zeros(1, 8, device="cuda")
    rows = TalkerRows(rows=3, capacity=16, groups=4, hidden_like=like, pad_id=0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.begin(1, params, prompt_ids=[1, 2], generated_ids=[3], seed=5, stop_ids=[7])
        rows.write_text(1, 2, [4, 5, 6])
        state.release(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows._texts[1, :6].tolist() == [0, 0, 4, 5, 6, 0]
