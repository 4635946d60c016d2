"""What is drawn: the right distribution, and the same token in every company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omnistage.ar.sampling import random as noise
from omnistage.ar.sampling import sampler as sampler_module
from omnistage.ar.sampling.features import SamplingFeatures
from omnistage.ar.sampling.row_state import SamplerState
from omnistage.ar.sampling.sampler import Sampler
from omnistage.contracts.sampling import OmniTokenSamplingParams as Params
from tests.ar.sampling.helpers import PROMPT, draw_many, make_sampler, sample

VOCAB = 97
DRAWS = 40_000


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """In standard deviations from what a fair draw gives (Wilson-Hilferty)."""
    expected = probabilities * counts.sum()
    enough = expected >= 5
    statistic = ((counts - expected)[enough] ** 2 / expected[enough]).sum()
    freedom = int(enough.sum()) - 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def random_logits(rows: int = 1, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 + 11])
def test_draws_follow_the_softmax(temperature, seed):
    logits = random_logits()[0]
    tokens = draw_many(Params(temperature=temperature), logits, DRAWS, seed=seed)
    counts = tokens.bincount(minlength=VOCAB).float()
    assert abs(chi_square(counts, (logits / temperature).softmax(0))) < 4
    assert chi_square(counts, (logits / (temperature * 1.1)).softmax(0)) > 8


def test_a_race_without_mixing_is_noticed(monkeypatch):
    """The check above can fail: noise that is the same at every position."""
    monkeypatch.setattr(sampler_module, "step_keys", lambda seeds, positions: seeds)
    logits = random_logits()[0]
    counts = draw_many(Params(temperature=1.0), logits, DRAWS).bincount(minlength=VOCAB).float()
    assert chi_square(counts, logits.softmax(0)) > 8


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_positions_and_seeds_are_independent(lag):
    """Pairs of draws of a uniform: neighbours in position, and equal positions of two seeds."""
    uniform, size = torch.zeros(8), 8
    first = draw_many(Params(temperature=1.0), uniform, DRAWS, seed=3)
    other = draw_many(Params(temperature=1.0), uniform, DRAWS, seed=3 + lag)
    for left, right in ((first[:-lag], first[lag:]), (first, other)):
        pairs = (left * size + right).bincount(minlength=size * size).float()
        assert abs(chi_square(pairs, torch.full((size * size,), 1 / size**2))) < 4


def test_noise_is_exponential_over_a_large_vocabulary():
    hashes = noise.token_hashes(200_000, "cpu")
    keys = noise.step_keys(torch.tensor([5, 6]), torch.tensor([9, 9]))
    values = noise.exponential_noise(keys, hashes)
    assert (values > 0).all()
    assert values.isfinite().all()
    assert values.mean(1).sub(1).abs().max() < 0.01
    for edge in (1e-4, 0.1, 1.0, 3.0):
        expected = 1 - torch.tensor(-edge).exp()
        spread = (expected * (1 - expected) / 200_000).sqrt()
        assert ((values < edge).float().mean(1) - expected).abs().max() < 5 * spread
    assert torch.corrcoef(values)[0, 1].abs() < 0.012


@pytest.mark.invariant("AR-INV-210")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 7, "top_p": 0.7},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"logit_bias": {3: 2.0}, "logprobs": 3},
    ],
)
def test_a_token_does_not_depend_on_its_company(options):
    params = Params(temperature=0.9, **options)
    crowd = [Params(temperature=0.0), params, Params(temperature=1.3, top_p=0.5, min_tokens=4)]
    crowd += [Params(temperature=2.0, frequency_penalty=1.0), Params(top_k=90)]
    for trial in range(20):
        logits = random_logits(5, seed=trial)
        alone = make_sampler([params], VOCAB, seed=trial)
        together = make_sampler(crowd, VOCAB, seed=trial, stop_ids=[7])
        position = len(PROMPT) + trial
        one = sample(alone, [params], logits[1:2], position=position)
        many = sample(together, crowd, logits, position=position)
        assert one.tokens[0] == many.tokens[1]


def test_every_feature_path_draws_the_same_token():
    """Candidates, a sorted vocabulary and no order at all: one noise, one winner."""
    logits = random_logits(1)
    params = Params(temperature=1.0, top_k=9)
    paths = [
        SamplingFeatures(greedy_only=False, candidates=64),
        SamplingFeatures(greedy_only=False, sorts=True),
        SamplingFeatures(greedy_only=False, sorts=True, min_p=True, logprobs=5),
    ]
    assert SamplingFeatures.of([params]) == paths[0]
    drawn = set()
    for position in range(40):
        sampler = make_sampler([params], VOCAB)
        at = (torch.tensor([0]), torch.tensor([position]))
        tokens = {int(sampler.sample(logits, *at, features=f).tokens) for f in paths}
        assert len(tokens) == 1
        drawn |= tokens
    assert len(drawn) > 3


@pytest.mark.invariant("AR-INV-210")
def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened():
    params = Params(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.6, min_tokens=5)
    logits = random_logits(12, seed=4)
    kept = make_sampler([params], VOCAB, stop_ids=[7])
    whole = [
        int(sample(kept, [params], logits[i : i + 1], position=3 + i).tokens) for i in range(12)
    ]
    again = make_sampler([params, params], VOCAB, stop_ids=[7])
    again.state.begin(1, params, prompt_ids=PROMPT, generated_ids=whole[:6], seed=0, stop_ids=[7])
    rest = [
        int(sample(again, [params], logits[i : i + 1], position=3 + i, rows=[1]).tokens)
        for i in range(6, 12)
    ]
    assert rest == whole[6:]
    assert len(set(whole)) > 3


def test_greedy_takes_the_largest_and_temperature_zero_stays_greedy_among_others():
    logits = random_logits(2)
    greedy, hot = Params(temperature=0.0), Params(temperature=1.5)
    for crowd in ([greedy, greedy], [greedy, hot]):
        tokens = sample(make_sampler(crowd, VOCAB), crowd, logits).tokens
        assert tokens[0] == logits[0].argmax()


def test_what_the_model_forbids_is_never_drawn():
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, [3, 50]] = torch.tensor([0.0, -30.0])
    params = Params(temperature=5.0, logit_bias={4: 100.0}, repetition_penalty=1.5)
    sampler = make_sampler([params], VOCAB)
    drawn = {int(sample(sampler, [params], logits, position=p).tokens) for p in range(3000)}
    assert drawn == {3, 50}


@pytest.mark.invariant("AR-INV-211")
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "nothing"])
def test_rows_without_numbers_are_reported_and_alone(options, bad):
    params = [Params(**options)] * 3
    logits = random_logits(3)
    if bad == "nothing":
        logits[1] = float("-inf")
    else:
        logits[1, 5] = bad
    result = sample(make_sampler(params, VOCAB), params, logits)
    assert result.finite.tolist() == [True, False, True]
    clean = sample(make_sampler(params, VOCAB), params, random_logits(3))
    assert result.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()
    assert 0 <= int(result.tokens[1]) < VOCAB


@pytest.mark.invariant("AR-INV-211")
def test_a_number_that_is_none_is_reported_behind_a_grammar_too():
    params = [Params(temperature=1.0)]
    logits = random_logits(1)
    logits[0, 40] = float("nan")
    bitmask = torch.tensor([[0b1110, 0, 0, 0]], dtype=torch.int32)
    result = sample(make_sampler(params, VOCAB), params, logits, bitmask=bitmask)
    assert result.finite.tolist() == [False]


def test_padding_rows_leave_the_others_alone():
    params = Params(temperature=1.0, repetition_penalty=1.2)
    logits = random_logits(3)
    plain, padded = make_sampler([params], VOCAB), make_sampler([params], VOCAB)
    one = sample(plain, [params], logits[:1])
    three = sample(padded, [params], logits, rows=[0, 1, 1])
    assert one.tokens[0] == three.tokens[0]
    assert padded.state.counts.generated[0].sum() == 1


def test_a_released_row_keeps_nothing():
    first = Params(temperature=1.0, logit_bias={9: 100.0}, min_tokens=50, presence_penalty=2.0)
    sampler = make_sampler([first], VOCAB, stop_ids=[4])
    assert int(sample(sampler, [first], random_logits()).tokens) == 9
    sampler.state.release(0)
    sampler.state.begin(0, Params(temperature=0.0), prompt_ids=PROMPT, seed=1)
    everything = SamplingFeatures(bias=True, penalties=True, min_tokens=True)
    logits = random_logits()
    logits[0, 4] = 50.0
    result = sampler.sample(logits, torch.tensor([0]), torch.tensor([3]), features=everything)
    assert int(result.tokens) == 4


def test_bfloat16_logits_are_sampled_in_float32():
    params = Params(temperature=0.8, logprobs=2)
    logits = random_logits().bfloat16()
    low = sample(make_sampler([params], VOCAB), [params], logits)
    high = sample(make_sampler([params], VOCAB), [params], logits.float())
    assert low.tokens == high.tokens
    assert low.logprobs.logprob.dtype == torch.float32


def test_rows_in_pieces_are_the_rows_in_one(monkeypatch):
    crowd = [
        Params(temperature=0.0, logprobs=2),
        Params(temperature=1.0, repetition_penalty=1.5),
        Params(temperature=1.2, top_p=0.7, logprobs=5),
    ]
    logits = random_logits(3)
    bitmask = torch.tensor([[-1] * 4, [0, -1, 0, 0], [-1] * 4], dtype=torch.int32)
    whole = sample(make_sampler(crowd, VOCAB), crowd, logits, bitmask=bitmask)
    monkeypatch.setattr(sampler_module, "CACHED_LOGITS", 1)
    pieces = sample(make_sampler(crowd, VOCAB), crowd, logits, bitmask=bitmask)
    assert whole.tokens.tolist() == pieces.tokens.tolist()
    assert 32 <= int(whole.tokens[1]) < 64
    assert whole.finite.tolist() == pieces.finite.tolist() == [True] * 3
    for row in range(3):
        assert whole.logprobs.of_row(row, 5) == pieces.logprobs.of_row(row, 5)


EVERY_FEATURE = [
    Params(temperature=0.0),
    Params(temperature=0.8),
    Params(temperature=0.8, top_k=20, top_p=0.8, logprobs=4),
    Params(temperature=0.8, top_p=0.9, min_p=0.01),
    Params(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=3),
    Params(temperature=0.9, logit_bias={4: 3.0}),
]


@pytest.mark.parametrize("params", EVERY_FEATURE, ids=str)
def test_sampling_never_reads_a_value_on_the_host(params):
    """A tensor on the meta device has none: reading one, or a shape that depends on one, raises."""
    state = SamplerState(2, VOCAB, "meta")
    state.begin(0, params, prompt_ids=PROMPT, seed=5, stop_ids=[7])
    features = replace(SamplingFeatures.of([params]), bitmask=True)
    rows, positions = (torch.zeros(3, dtype=torch.int64, device="meta") for _ in range(2))
    logits = torch.zeros(3, VOCAB, device="meta")
    bitmask = torch.zeros(3, 4, dtype=torch.int32, device="meta")
    found = Sampler(state).sample(logits, rows, positions, features=features, bitmask=bitmask)
    assert found.tokens.shape == found.finite.shape == (3,)
    with pytest.raises(RuntimeError):
        found.tokens.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("params", EVERY_FEATURE, ids=str)
def test_a_captured_graph_draws_what_the_host_draws(params):
    """The graph is captured once and replayed for every step, with other logits and positions."""
    steps, size = 12, 2003
    state = SamplerState(2, size, "cuda")
    begin = {"prompt_ids": PROMPT, "seed": 5, "stop_ids": [7]}
    state.begin(0, params, **begin)
    features = SamplingFeatures.of([params])
    state.reserve(features)
    sampler, host = Sampler(state), make_sampler([params], size, **begin)
    logits = torch.zeros(2, size, device="cuda")
    rows = torch.tensor([0, 2], device="cuda")
    positions = torch.full((2,), len(PROMPT), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sampler.sample(logits, rows, positions, features=features)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = sampler.sample(logits, rows, positions, features=features)
    state.begin(0, params, **begin)
    for step in range(steps):
        fresh = torch.randn(1, size, generator=torch.Generator().manual_seed(step)) * 3
        logits.copy_(fresh.expand(2, -1))
        graph.replay()
        expected = sample(host, [params], fresh, position=len(PROMPT) + step)
        assert int(captured.tokens[0]) == int(expected.tokens)
        positions += 1
