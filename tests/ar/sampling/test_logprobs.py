"""Log-probabilities are those of the model, before everything that sampling does to them."""

from __future__ import annotations

import pytest
import torch

from omnistage.ar.sampling.logprobs import logprobs_of
from omnistage.contracts.sampling import OmniTokenSamplingParams as Params
from tests.ar.sampling.helpers import make_sampler, sample

VOCAB = 50


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_they_are_of_the_raw_distribution(temperature):
    params = Params(
        temperature=temperature, top_k=3, repetition_penalty=1.8, logit_bias={4: 9.0}, logprobs=5
    )
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    result = sample(make_sampler([params], VOCAB), [params], logits)
    found = result.logprobs.of_row(0, 5)
    expected = logits[0].log_softmax(0)
    order = expected.argsort(descending=True).tolist()
    token = int(result.tokens)
    assert token == 4
    assert found.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert found.rank == order.index(token) + 1 > 1
    assert [i for i, _ in found.top] == order[:5]
    assert [v for _, v in found.top] == pytest.approx(expected[order[:5]].tolist(), abs=1e-5)


def test_a_request_gets_as_many_as_it_asked_for():
    crowd = [Params(temperature=0.0, logprobs=0), Params(temperature=0.0, logprobs=3)]
    result = sample(make_sampler(crowd, VOCAB), crowd, torch.randn(2, VOCAB))
    assert result.logprobs.of_row(0, 0).top == []
    assert len(result.logprobs.of_row(1, 3).top) == 3
    assert result.logprobs.of_row(0, 0).rank == 1


def test_nobody_who_does_not_ask_pays():
    params = [Params(temperature=0.0)]
    assert sample(make_sampler(params, VOCAB), params, torch.randn(1, VOCAB)).logprobs is None


def test_a_vocabulary_smaller_than_what_was_asked_is_reported_whole():
    assert logprobs_of(torch.randn(2, 3), torch.tensor([0, 1]), 20).top_ids.shape == (2, 3)
