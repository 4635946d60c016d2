"""Cases of the draw's kernels, for Triton's interpreter (`python -m`) and for a card."""

from __future__ import annotations

from typing import NamedTuple

import torch

from omnistage.ar.sampling.features import SamplingFeatures
from omnistage.ar.sampling.filters import descending, min_p_threshold, ordered_threshold
from omnistage.ar.sampling.random import exponential_noise, signed_seed, step_keys, token_hashes
from omnistage.ar.sampling.row_state import SamplerState
from omnistage.contracts.sampling import OmniTokenSamplingParams as Params

PARAMS = (
    Params(temperature=1.0),
    Params(temperature=0.7, top_p=0.9),
    Params(temperature=0.0, top_k=3, top_p=0.5),
    Params(temperature=1.3, top_k=300),
    Params(temperature=0.8, top_k=40, top_p=0.8),
    Params(temperature=1.0, top_p=0.3, min_p=0.02),
    Params(temperature=1.1, min_p=0.1),
    Params(temperature=2.0, top_p=0.9999),
    Params(temperature=1.0, top_k=1),
    Params(temperature=0.6, top_k=10**6, top_p=0.95),
    Params(temperature=1.0, top_p=1e-9),
)
SEEDS = (0, 1, -5, 2**63 + 11, 123456789, -(2**62))
CLOSE = 2e-5
"""Share of a row's mass by which float32 sums of different order may disagree."""


class Case(NamedTuple):
    shape: str
    rows: int = len(PARAMS)
    vocab_size: int = 3001
    dtype: torch.dtype = torch.float32
    padding: int = 0


SMALL_CASES = (
    Case("random"),
    Case("random", dtype=torch.bfloat16, padding=7),
    Case("peaked", vocab_size=2048),
    Case("flat", vocab_size=1500),
    Case("tied"),
    Case("equal", vocab_size=1030),
    Case("forbidden", rows=22, vocab_size=2500),
    Case("random", rows=1, vocab_size=70_001),
    Case("random", vocab_size=5),
)


def logits_of(case: Case) -> torch.Tensor:
    """(rows, vocab_size) on the CPU; `padding` columns of another tensor lie between its rows."""
    draw = torch.Generator().manual_seed(len(case.shape))
    normal = torch.randn(case.rows, case.vocab_size, generator=draw)
    shaped = {
        "random": normal * 3,
        "peaked": normal + 40 * (torch.arange(case.vocab_size) == case.vocab_size // 3),
        "flat": normal * 1e-3,
        "tied": (normal * 2).round(),
        "equal": torch.full_like(normal, -2.5),
        "forbidden": (normal * 3).masked_fill(normal < 0.5, float("-inf")),
    }[case.shape]
    wide = torch.full((case.rows, case.vocab_size + case.padding), 1e4, dtype=case.dtype)
    wide[:, : case.vocab_size] = shaped
    return wide[:, : case.vocab_size]


def state_of(case: Case, device: str) -> tuple[SamplerState, torch.Tensor, list[Params]]:
    """State whose rows are not in the batch's order, the batch's rows (R,), their parameters."""
    params = [PARAMS[(i + (case.rows == 1)) % len(PARAMS)] for i in range(case.rows)]
    state = SamplerState(case.rows + 3, case.vocab_size, device)
    rows = [(i * 7 + 2) % (case.rows + 2) for i in range(case.rows)]
    rows = rows if len(set(rows)) == len(rows) else list(range(case.rows))[::-1]
    for i, row in enumerate(rows):
        state.begin(row, params[i], prompt_ids=[1], seed=SEEDS[i % len(SEEDS)] + i)
    return state, torch.tensor(rows), params


class Expected(NamedTuple):
    """On the CPU, by `filters.py` and `random.py`."""

    scaled: torch.Tensor
    thresholds: torch.Tensor
    with_min_p: torch.Tensor
    speeds: torch.Tensor


def expected_of(
    logits: torch.Tensor, state: SamplerState, rows: torch.Tensor, positions: torch.Tensor
) -> Expected:
    floats, integers = state.of_rows(rows)
    logits = logits.float()
    temperature = torch.where(floats["temperature"] > 0, floats["temperature"], 1.0)
    scaled = (logits - logits.amax(1, keepdim=True)) / temperature[:, None]
    found = ordered_threshold(descending(scaled), integers["top_k"], floats["top_p"])
    with_min_p = torch.maximum(found, min_p_threshold(floats["min_p"]))
    weights = torch.where(scaled >= with_min_p[:, None], scaled.exp(), 0.0)
    keys = step_keys(integers["seed"], positions)
    speeds = weights / exponential_noise(keys, state.hashes)
    return Expected(scaled, found, with_min_p, speeds)


def compare_thresholds(case: Case, device: str) -> None:
    from omnistage.ar.sampling.triton_threshold import ordered_thresholds

    logits = logits_of(case)
    state, rows, params = state_of(case, "cpu")
    want = expected_of(logits, state, rows, torch.zeros_like(rows))
    there, _, _ = state_of(case, device)
    moved = moved_to(logits, device)
    got = ordered_thresholds(moved, moved.amax(1), rows.to(device), there).cpu()
    same = 0
    for i, one in enumerate(params):
        if one.temperature == 0 or (not one.top_k and (one.top_p or 1) >= 1):
            assert got[i] == float("-inf"), (case, one)
        elif (one.top_p or 1) >= 1:
            assert got[i] == want.thresholds[i], (case, one, got[i], want.thresholds[i])
        else:
            assert_holds_mass(want.scaled[i].double(), one, float(got[i]))
        same += bool(got[i] == want.thresholds[i]) or one.temperature == 0
    assert same >= 0.8 * len(params), f"{case}: {same} of {len(params)} as by sorting"


def assert_holds_mass(scaled: torch.Tensor, params: Params, threshold: float) -> None:
    """In float64: less than top_p lies above the threshold, and no less at and above it."""
    kept = min(params.top_k or len(scaled), len(scaled))
    by_k = scaled.sort(descending=True).values[kept - 1]
    weights = torch.where(scaled >= by_k, scaled.exp(), 0.0)
    share = weights / weights.sum()
    assert threshold == float("-inf") or (scaled == threshold).any(), (params, threshold)
    assert threshold >= by_k
    above, held = float(share[scaled > threshold].sum()), float(share[scaled >= threshold].sum())
    assert above < params.top_p + CLOSE or threshold == 0, (params, threshold, above)
    assert held >= params.top_p - CLOSE, (params, threshold, held)


def compare_draws(case: Case, device: str, *, filtered: bool) -> int:
    """How many rows that are not greedy drew another token, in a race too close to call."""
    from omnistage.ar.sampling.triton_draw import draw

    logits = logits_of(case)
    state, rows, params = state_of(case, "cpu")
    positions = torch.arange(len(rows)) * 1009 + 3
    if not filtered:
        state.floats[:, 1] = 1.0
        state.integers[:, 1] = 0
    want = expected_of(logits, state, rows, positions)
    there, _, _ = state_of(case, device)
    moved = moved_to(logits, device)
    best, greedy = moved.max(1)
    got = draw(
        moved, best, greedy, rows.to(device), positions.to(device), there,
        thresholds=want.thresholds.to(device) if filtered else None,
    ).cpu()  # fmt: skip
    changed = 0
    for i, one in enumerate(params):
        if one.temperature == 0:
            assert got[i] == greedy[i].cpu()
            continue
        speeds = want.speeds[i]
        assert speeds[got[i]] >= speeds.max() * (1 - CLOSE), (case, one, int(got[i]))
        changed += int(got[i]) != int(speeds.argmax())
    return changed


def compare(case: Case, device: str) -> None:
    compare_thresholds(case, device)
    for filtered in (False, True):
        changed = compare_draws(case, device, filtered=filtered)
        assert changed <= 0.05 * case.rows, (case, changed)


def moved_to(logits: torch.Tensor, device: str) -> torch.Tensor:
    """On the device with its row stride."""
    whole = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=device)
    return whole.copy_(logits)


def ties_go_to_the_lowest(device: str) -> None:
    """Equal noise and equal logits, in several programs and in one lane of one program."""
    from omnistage.ar.sampling.triton_draw import draw

    state = SamplerState(2, 9000, device)
    state.begin(0, Params(temperature=1.0), prompt_ids=[1], seed=3)
    state.hashes.fill_(12345)
    logits = torch.full((2, 9000), -3.0, device=device)
    logits[0, [8999, 5000, 1030, 4100, 6]] = 2.0
    logits[1, 77] = 1.0
    best, greedy = logits.max(1)
    rows = torch.tensor([0, 1], device=device)
    assert draw(logits, best, greedy, rows, rows + 9, state).tolist() == [6, 77]


def noise_is_that_of_torch(device: str) -> None:
    from tests.ar.sampling.noise_kernel import noise_of

    seeds = torch.tensor([signed_seed(seed) for seed in SEEDS])
    keys, hashes = step_keys(seeds, torch.arange(len(SEEDS))), token_hashes(8000, "cpu")
    hashes[:4] = keys[0].to(torch.int32)
    got = noise_of(keys.to(device), hashes.to(device)).cpu()
    torch.testing.assert_close(got, exponential_noise(keys, hashes), rtol=1e-6, atol=0)


def no_numbers_leave_the_others(device: str) -> None:
    """Rows of NaN and of nothing allowed give an id of the vocabulary; the third is as alone."""
    from omnistage.ar.sampling.triton_draw import draw
    from omnistage.ar.sampling.triton_threshold import ordered_thresholds

    case = Case("random", rows=3, vocab_size=2100)
    state, rows, _ = state_of(case, device)
    state.floats[:, :2] = torch.tensor([0.9, 0.8], device=device)
    rows = rows.to(device)
    logits = logits_of(case).to(device)
    logits[0, 5:] = float("nan")
    logits[1] = float("-inf")
    best, greedy = logits.max(1)
    found = ordered_thresholds(logits, best, rows, state)
    tokens = draw(logits, best, greedy, rows, rows, state, thresholds=found)
    assert ((tokens >= 0) & (tokens < 2100)).all()
    last = slice(2, 3)
    alone = ordered_thresholds(logits[last], best[last], rows[last], state)
    args = (logits[last], best[last], greedy[last], rows[last], rows[last], state)
    assert alone == found[last] > float("-inf")
    assert draw(*args, thresholds=alone) == tokens[last]


def features_of(params: list[Params]) -> SamplingFeatures:
    found = SamplingFeatures.of(params)
    assert found.sorts, found
    assert not found.candidates, found
    assert not found.greedy_only, found
    return found


if __name__ == "__main__":
    for each in SMALL_CASES:
        compare(each, "cpu")
    ties_go_to_the_lowest("cpu")
    no_numbers_leave_the_others("cpu")
    noise_is_that_of_torch("cpu")
    print(f"{len(SMALL_CASES)} cases agree")
