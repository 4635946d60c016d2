"""What stands in captured graphs asks the device nothing: fake tensors have no values to give."""

from __future__ import annotations

import pytest

from omnistage.ar.model import ModelBatch
from tests.models.qwen3_omni.requests import talker_model, thinker_model

ROWS = 4


def decode_batch():
    import torch

    return ModelBatch(
        token_ids=torch.arange(ROWS),
        positions=torch.arange(ROWS).expand(3, -1).clone(),
        num_decodes=ROWS,
        rows=torch.arange(ROWS),
    )


def decode(model):
    """All of a decode step but the layers, whose experts are the runtime's concern."""
    import torch

    batch = decode_batch()
    embeds, arguments = model.embed(batch)
    hidden = torch.zeros_like(embeds)
    tokens = model.logits(hidden).argmax(-1)
    model.sampled(batch.rows, hidden, tokens)
    return embeds, arguments, model.step_payload(batch.rows)


@pytest.mark.parametrize("build", [thinker_model, talker_model])
def test_a_decode_step_reads_no_values(build):
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = build()
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        embeds, arguments, payload = decode(model)
    assert embeds.shape[0] == ROWS
    assert arguments["position_ids"].shape == (3, 1, ROWS)
    assert all(len(tensor) == ROWS for tensor in payload.values())


def test_reading_a_value_would_be_noticed():
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(1).item()
