"""The choice: within its budget, never worse for more memory, and refusals that name what works."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from omnistage.memory.budget import DeviceBudget
from omnistage.memory.planning.candidates import SLOT_COUNT, Constraints
from omnistage.memory.planning.choose import Choice, choose, headroom
from omnistage.memory.planning.refusal import Refusal, changed
from omnistage.memory.planning.work import PHASES
from tests.memory.planning.problems import GIB, MIB, facts_of, problems, qwen_like

CHECKED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How slow a machine is proves nothing."""


def with_memory(problem, more_bytes: int):
    facts = replace(
        problem.facts,
        free_bytes=problem.facts.free_bytes + more_bytes,
        total_bytes=problem.facts.total_bytes + more_bytes,
    )
    budget = DeviceBudget(
        limit_bytes=problem.budget.limit_bytes + more_bytes, is_set=problem.budget.is_set
    )
    return replace(problem, facts=facts, budget=budget)


@pytest.mark.invariant("PLAN-INV-002")
@CHECKED
@given(problems(), st.integers(0, 300))
def test_more_memory_is_never_slower_and_never_refused(problem, more_mib):
    first = choose(problem)
    assume(isinstance(first, Choice))
    second = choose(with_memory(problem, more_mib * MIB))
    assert isinstance(second, Choice)
    if problem.memory != "minimal":
        assert second.candidate.request_s <= first.candidate.request_s * (1 + 1e-5)


@pytest.mark.invariant("PLAN-INV-003")
@CHECKED
@given(problems())
def test_a_refusal_names_what_works(problem):
    made = choose(problem)
    assume(isinstance(made, Refusal))
    assert made.nearest, made.message
    assert isinstance(choose(changed(problem, made.nearest)), Choice), made.message


@pytest.mark.invariant("PLAN-INV-002")
@CHECKED
@given(problems())
def test_what_is_chosen_stays_within_the_budget(problem):
    made = choose(problem)
    assume(isinstance(made, Choice))
    assert made.candidate.peak_bytes <= problem.budget.limit_bytes
    assert made.candidate.locking.host_bytes <= problem.facts.host_free_bytes
    left_bytes = problem.budget.limit_bytes - made.candidate.peak_bytes
    assert made.is_short or left_bytes >= made.headroom_bytes
    limit_bytes = problem.constraints.page_lock_limit_bytes
    if limit_bytes is not None:
        staging_bytes = SLOT_COUNT * made.candidate.slot_bytes
        assert made.candidate.locking.locked_bytes <= limit_bytes + staging_bytes


@pytest.mark.invariant("PLAN-INV-005")
@CHECKED
@given(problems())
def test_everything_counted_adds_up(problem):
    for one in problem.candidates():
        if one.strategy == "model":
            continue
        away_bytes = sum(
            block.resident_bytes
            for name, kept in one.residents.items()
            for index, block in enumerate(problem.sizes[name].blocks)
            if index not in kept
        )
        weight_bytes = sum(size.weight_bytes for size in problem.sizes.values())
        for phase in PHASES:
            assert one.phases_bytes[phase] == (
                weight_bytes
                - away_bytes
                + SLOT_COUNT * one.slot_bytes
                + problem.facts.workspace_bytes
                + problem.work.activation_bytes(phase)
            )


def test_swapped_components_are_counted_in_turns():
    problem = qwen_like(80, constraints=Constraints(strategies=("model",)))
    (one,) = problem.candidates()
    transformer, encoder, vae = (
        problem.sizes[name].weight_bytes for name in ("transformer", "text_encoder", "vae")
    )
    assert one.phases_bytes == {
        "encode": vae + encoder + 200 * MIB,
        "denoise": vae + transformer + 700 * MIB,
        "decode": vae + transformer + 2500 * MIB,
    }
    assert one.locking.host_bytes == transformer + encoder


def test_modes_in_their_order():
    speed, balanced, minimal = (
        choose(qwen_like(30, mode)).candidate for mode in ("speed", "balanced", "minimal")
    )
    assert minimal.peak_bytes < balanced.peak_bytes < speed.peak_bytes
    assert speed.request_s <= balanced.request_s <= minimal.request_s
    assert {len(kept) for kept in minimal.residents.values()} == {0}


def test_auto_streams_only_what_it_must():
    assert choose(qwen_like(80)).candidate.strategy == "none"
    half = choose(qwen_like(40)).candidate
    assert half.strategy == "layerwise"
    assert 0 < len(half.residents["transformer"]) < 60
    # what is left over is too little for a block of the denoiser
    assert len(half.residents["text_encoder"]) <= 1


def test_copies_that_computation_hides_leave_their_room_to_others():
    busy = choose(qwen_like(35, block_ms=20)).candidate
    assert busy.strategy == "layerwise"
    assert len(busy.residents["text_encoder"]) > 25
    assert len(busy.residents["transformer"]) < 30
    assert busy.step_s == pytest.approx(choose(qwen_like(80, block_ms=20)).candidate.step_s)


def test_blocks_that_do_not_run_stream_first_and_cost_nothing():
    problem = qwen_like(55, "speed", block_ms=0.001)
    encoder = problem.work.components["text_encoder"]
    used = {f"blocks.{index}": 0.0005 for index in range(20)}
    components = {**problem.work.components, "text_encoder": replace(encoder, block_s=used)}
    problem = replace(problem, work=replace(problem.work, components=components))
    chosen = choose(problem).candidate
    assert chosen.strategy == "layerwise"
    assert chosen.residents["text_encoder"] == tuple(range(20))
    assert len(chosen.residents["transformer"]) == 60
    whole = choose(replace(problem, budget=DeviceBudget(limit_bytes=80 * GIB))).candidate
    assert whole.strategy == "none"
    assert chosen.request_s == pytest.approx(whole.request_s)


def test_what_the_allocator_holds_unused_has_its_room():
    problem = qwen_like(80, "speed", constraints=Constraints(strategies=("none",)))
    (one,) = problem.candidates()
    exact = replace(problem, budget=DeviceBudget(limit_bytes=problem.needed_bytes(one)))
    assert problem.needed_bytes(one) > one.peak_bytes
    assert isinstance(choose(exact), Choice)
    less = replace(problem, budget=DeviceBudget(limit_bytes=problem.needed_bytes(one) - 1))
    assert isinstance(choose(less), Refusal)


def test_balanced_leaves_room_for_a_second_request():
    problem = qwen_like(20, "balanced")
    assert headroom(problem) == 2500 * MIB
    assert headroom(replace(problem, budget=DeviceBudget(limit_bytes=50 * GIB))) == 5 * GIB


def test_leading_residents_are_what_was_asked_for():
    constraints = Constraints(strategies=("layerwise",), resident_layers=7)
    made = choose(qwen_like(30, constraints=constraints))
    assert made.candidate.residents["transformer"] == tuple(range(7))
    made = choose(qwen_like(9, constraints=constraints))
    assert isinstance(made, Refusal)
    assert "dlo_resident_layers 1" in made.message
    assert "7 leading blocks" in made.message


def test_a_slow_link_is_not_hidden():
    fast = choose(qwen_like(12)).candidate
    unlocked = Constraints(page_lock_limit_bytes=0)
    slow = choose(qwen_like(12, constraints=unlocked)).candidate
    assert slow.step_s > 3 * fast.step_s
    assert not slow.locking.locked_components


def test_shares_of_ranks_copy_their_part():
    alone = Constraints(strategies=("distributed-layerwise",))
    one = choose(qwen_like(12, constraints=alone)).candidate
    four = choose(qwen_like(12, constraints=replace(alone, shares=4))).candidate
    assert four.step_s < one.step_s
    assert four.locking.locked_bytes < one.locking.locked_bytes


def test_private_memory_must_fit_the_host():
    small_host = facts_of(12 * GIB, host_bytes=8 * GIB)
    problem = qwen_like(12, facts=small_host)
    sizes = {name: replace(one, is_mapped=False) for name, one in problem.sizes.items()}
    problem = replace(
        problem,
        sizes=sizes,
        constraints=Constraints(runtime_cache="off", strategies=("layerwise",)),
    )
    made = choose(problem)
    assert isinstance(made, Refusal)
    assert "of host memory" in made.message
    assert made.nearest == {"dlo_runtime_cache": "auto"}
