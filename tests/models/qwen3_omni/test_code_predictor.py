"""Frames in a static cache against the code predictor's own `generate`."""

from __future__ import annotations

import pytest

from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.requests import talker_model

ROWS = 5


@pytest.fixture(scope="module")
def inputs():
    """hidden (ROWS, H), tokens (ROWS,) and their embeddings."""
    import torch

    generator = torch.Generator().manual_seed(0)
    embedding = talker_model().module.model.codec_embedding
    tokens = torch.randint(64, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, embedding.embedding_dim, generator=generator)
    return hidden, tokens, embedding(tokens).detach()


def greedy(logits, group):
    return logits.argmax(-1)


def frames(hidden, tokens, embeds, choose=greedy):
    import torch

    with torch.inference_mode():
        return talker_model()._predictor.predict(hidden, tokens, embeds, choose)


@pytest.mark.invariant("QWEN-OMNI-INV-001")
def test_codes_equal_generate(inputs):
    import torch

    hidden, tokens, embeds = inputs
    theirs = reference.model().talker.code_predictor
    sequences = theirs.generate(
        inputs_embeds=torch.stack((hidden, embeds), dim=1),
        max_new_tokens=theirs.config.num_code_groups - 1,
        do_sample=False,
    )
    codes, summed = frames(*inputs)
    assert torch.equal(codes, torch.cat((tokens[:, None], sequences), dim=1))
    tables = theirs.get_input_embeddings()
    parts = [embeds] + [table(sequences[:, i]) for i, table in enumerate(tables)]
    assert torch.allclose(summed, torch.stack(parts).sum(0), atol=1e-6)


@pytest.mark.invariant("QWEN-OMNI-INV-002")
def test_a_frame_does_not_depend_on_its_batch(inputs):
    """Nor on what stands in the cache from the frames before it."""
    import torch

    hidden, tokens, embeds = inputs
    together, _ = frames(*inputs)
    frames(hidden.flip(0), tokens.flip(0), embeds.flip(0))
    for row in range(ROWS):
        alone, _ = frames(hidden[row : row + 1], tokens[row : row + 1], embeds[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_draws_keep_to_the_likely_codes_and_to_their_seed(inputs):
    """The code predictor samples among the most likely that make up 0.8."""
    import torch

    from omnistage.models.qwen3_omni.code_sampling import CodeSampling

    sampling = CodeSampling(ROWS, 64, 4, "cpu")
    sampling._seeds[:] = torch.arange(ROWS)
    sampling._samples[:] = True
    logits = torch.tensor([[0.0] * 61 + [5.0, 6.0, 7.0]]).expand(ROWS, -1)
    rows = torch.arange(ROWS)
    drawn = torch.stack(
        [sampling.of_rows(rows, torch.full((ROWS,), step))(logits, 1) for step in range(200)]
    )
    shares = torch.bincount(drawn.flatten(), minlength=64) / drawn.numel()
    kept = torch.softmax(torch.tensor([6.0, 7.0]), 0)
    assert torch.allclose(shares[62:], kept, atol=0.05)
    assert float(shares[:62].sum()) == 0
    again = sampling.of_rows(rows, torch.full((ROWS,), 3))(logits, 1)
    assert torch.equal(again, drawn[3])
    sampling._samples[:] = False
    assert set(sampling.of_rows(rows, rows)(logits, 1).tolist()) == {63}
