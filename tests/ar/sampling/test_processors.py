"""Filters and penalties against the logits processors of `transformers`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omnistage.ar.sampling import constraints, filters
from omnistage.ar.sampling import sampler as sampler_module
from omnistage.ar.sampling.features import SamplingFeatures
from omnistage.contracts.sampling import OmniTokenSamplingParams as Params
from tests.ar.sampling.helpers import PROMPT, make_sampler, sample

VOCAB = 160


def reference(params: Params, logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """(V,) probabilities after what `generate` applies, in its order."""
    steps = LogitsProcessorList()
    if params.repetition_penalty:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None and params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([token_ids]), logits[None].clone())[0].softmax(0)


def ours(params: Params, logits: torch.Tensor, monkeypatch) -> torch.Tensor:
    """(V,) probabilities that the draw is made from: the race's weights, without its noise."""
    seen = {}

    def flat_noise(keys, hashes):
        shape = (len(keys), hashes.shape[-1])
        seen["hashes"] = hashes.expand(shape)
        return torch.ones(shape)

    def keep(self, divisor):
        seen["weights"] = self.clone()
        return divide(self, divisor)

    divide = torch.Tensor.div_
    sampler = make_sampler([params], VOCAB)
    with monkeypatch.context() as patch:
        patch.setattr(sampler_module, "exponential_noise", flat_noise)
        patch.setattr(torch.Tensor, "div_", keep)
        sample(sampler, [params], logits[None])
    token_of = {int(value): token for token, value in enumerate(sampler.state.hashes)}
    found = torch.zeros(VOCAB)
    for value, weight in zip(seen["hashes"][0].tolist(), seen["weights"][0], strict=True):
        found[token_of[value]] = weight
    return found / found.sum()


CASES = [
    Params(temperature=0.7),
    Params(temperature=0.7, top_k=1),
    Params(temperature=1.3, top_k=20),
    Params(temperature=1.0, top_k=150),
    Params(temperature=1.0, top_k=500),
    Params(temperature=0.6, top_p=0.95),
    Params(temperature=1.0, top_p=0.1),
    Params(temperature=2.0, top_p=0.9999),
    Params(temperature=1.0, min_p=0.05),
    Params(temperature=0.7, top_k=20, top_p=0.8),
    Params(temperature=1.4, top_k=40, top_p=0.9, min_p=0.02),
    Params(temperature=0.8, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
    Params(temperature=1.0, top_p=1.0, repetition_penalty=0.7),
]


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.invariant("AR-INV-212")
@pytest.mark.parametrize("params", CASES, ids=str)
def test_the_distribution_is_that_of_transformers(params, monkeypatch):
    for seed in range(5):
        logits = random_logits(seed)
        expected = reference(params, logits, PROMPT)
        found = ours(params, logits, monkeypatch)
        assert expected.max() > 0.02
        assert ((found > 0) == (expected > 0)).all()
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def _one_too_many(ordered, top_k, top_p):
    return filters.ordered_threshold(ordered, top_k + 1, top_p)


def _less_mass(ordered, top_k, top_p):
    return filters.ordered_threshold(ordered, top_k, top_p * 0.9)


def _five_fold(min_p):
    return filters.min_p_threshold(min_p * 5)


def _divides_only(logits, in_prompt, counts, repetition, *rest):
    return torch.where(in_prompt, logits / repetition.unsqueeze(1), logits)


@pytest.mark.parametrize(
    ("params", "module", "name", "broken"),
    [
        (Params(top_k=20), sampler_module, "ordered_threshold", _one_too_many),
        (Params(top_p=0.9), sampler_module, "ordered_threshold", _less_mass),
        (Params(min_p=0.05), sampler_module, "min_p_threshold", _five_fold),
        (Params(repetition_penalty=1.3), constraints, "apply_penalties", _divides_only),
    ],
)
def test_an_error_in_a_filter_is_noticed(params, module, name, broken, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    seen = [
        torch.allclose(
            ours(params, random_logits(seed), monkeypatch),
            reference(params, random_logits(seed), PROMPT),
            atol=1e-6,
        )
        for seed in range(5)
    ]
    assert not all(seen)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(1, VOCAB),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.5),
    spread=st.floats(0.1, 8.0),
)
def test_filters_keep_what_transformers_keeps(seed, top_k, top_p, min_p, spread):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    scaled = logits - logits.max()
    ordered = scaled.sort(descending=True).values[None]
    threshold = filters.ordered_threshold(ordered, torch.tensor([top_k]), torch.tensor([top_p]))
    kept = scaled >= torch.maximum(threshold, filters.min_p_threshold(torch.tensor([min_p])))
    params = Params(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference(params, logits, PROMPT) > 0
    assert kept.any()
    assert (kept ^ expected).sum() <= 1
    if (kept ^ expected).any():
        mass = logits.softmax(0)[kept ^ expected]
        assert mass.max() < 1e-5 or _rounds_at(logits, top_k, top_p, min_p)


def _rounds_at(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether float64 finds the boundary within float32's rounding of a token."""
    exact = logits.double().sort(descending=True).values[:top_k].softmax(0)
    before = exact.cumsum(0) - exact
    at_p = (before - top_p).abs().min() < 1e-6
    return bool(at_p or (exact / exact[0] - min_p).abs().min() < 1e-6)


def test_tokens_that_tie_with_the_last_one_stay():
    ordered = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    by_k = filters.ordered_threshold(ordered, torch.tensor([2]), torch.tensor([1.0]))
    assert by_k.tolist() == [-1.0]
    assert filters.ordered_threshold(ordered, torch.tensor([0]), torch.tensor([1.0])) == -torch.inf


@pytest.mark.parametrize("penalized", [True, False])
def test_penalties_count_prompt_and_output_as_their_definitions_say(penalized):
    """OpenAI: logit - count * frequency - (count > 0) * presence, over what was generated."""
    params = Params(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2
    )
    generated = [10, 10, 11]
    sampler = make_sampler([params], VOCAB, generated_ids=generated, penalized=penalized)
    logits = random_logits(3)
    found = sampler._constrained(
        logits[None],
        torch.tensor([0]),
        torch.tensor([6]),
        SamplingFeatures(penalties=True),
        None,
    )[0]
    seen = (PROMPT if penalized else []) + generated
    expected = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([seen]), logits[None].clone())[0]
    for token in generated:
        expected[token] -= 0.2
    for token in set(generated):
        expected[token] -= 0.3
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert (found - logits).abs().max() > 0.3


def test_generated_tokens_are_counted_step_by_step():
    params = Params(temperature=0.0, frequency_penalty=1.0)
    sampler = make_sampler([params], VOCAB)
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([2.5, 2.1, 1.9])
    found = [int(sample(sampler, [params], logits, position=3 + i).tokens) for i in range(6)]
    assert found == [0, 1, 2, 0, 1, 2]


def test_min_tokens_forbids_stops_until_enough_were_generated():
    params = Params(temperature=0.0, min_tokens=3)
    logits = random_logits(1)
    logits[[7, 8]] = 60.0
    sampler = make_sampler([params], VOCAB, stop_ids=[7, 8])
    second = int(random_logits(1)[[t for t in range(VOCAB) if t not in (7, 8)]].argmax())
    second += 2 * (second >= 7)
    tokens = [int(sample(sampler, [params], logits[None], position=3 + i).tokens) for i in range(5)]
    assert tokens == [second, second, second, 7, 7]


def test_bias_is_added_to_its_tokens_only():
    params = Params(temperature=0.0, logit_bias={0: -100.0, 9: 2.5})
    sampler = make_sampler([params], VOCAB)
    logits = random_logits(2)
    at = (torch.tensor([0]), torch.tensor([3]))
    found = sampler._constrained(logits[None], *at, SamplingFeatures(bias=True), None)[0]
    expected = logits.clone()
    expected[0] -= 100
    expected[9] += 2.5
    torch.testing.assert_close(found, expected)


@settings(deadline=None, max_examples=30)
@given(
    allowed=st.sets(st.integers(0, 69), min_size=1), vocab_size=st.sampled_from([64, 65, 70, 96])
)
def test_a_bitmask_allows_exactly_its_bits(allowed, vocab_size):
    words = [0] * ((vocab_size + 31) // 32)
    for token in (t for t in allowed if t < vocab_size):
        words[token // 32] |= 1 << token % 32
    signed = [w - 2**32 if w >= 2**31 else w for w in words]
    masked = constraints.apply_bitmask(
        torch.zeros(1, vocab_size), torch.tensor([signed], dtype=torch.int32)
    )
    found = {int(t) for t in masked[0].isfinite().nonzero()}
    assert found == {t for t in allowed if t < vocab_size}
