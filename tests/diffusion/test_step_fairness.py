"""Step mode is fair: nothing starves, and nobody is held up for long by later requests."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.diffusion import turns
from tests.diffusion.fake_executor import REFUSED
from tests.diffusion.step_world import COSTS, World


def commands_until_the_end(max_num_seqs, max_overtakes, most_steps, ahead, cost_ratio) -> int:
    """At most so many commands pass until a request of equal priority has ended, whatever arrives.

    N `max_num_seqs`, K `max_overtakes`, S steps of the longest, A requests ahead of it, r the ratio
    of the dearest step to the cheapest. No previews, no failures.

    Until it is admitted only the N that run, the A ahead and the K that overtake it are served, and
    each command serves at least one of them, each S + 2 times: (N + A + K)(S + 2).

    Then it is encoded, after one wave at most. It is due when the device has done P S times the
    dearest step (P `PATIENCE`), which takes at most P S r + 1 waves. From then on waves that leave
    it out hold only the at most N - 1 others that are here by then (`turn` says why): (N - 1) S.
    With its own S steps these are W = P S r + N S + 2 waves. With each come at most one encoding
    and N decodes: (W + 1)(N + 2) with its decode.
    """
    n, s = max_num_seqs, most_steps
    waves = turns.PATIENCE * s * cost_ratio + n * s + 2
    return int((n + ahead + max_overtakes) * (s + 2) + (waves + 1) * (n + 2))


def flood(data, world, target, most_steps, limit) -> int:
    """Commands until `target` has ended while others never stop coming."""
    names = count()
    for number in range(limit + 1):
        if target in world.ended:
            return number
        while world.scheduler.counts()[1] < 4:
            cost = data.draw(st.sampled_from(COSTS))
            prompt = data.draw(st.sampled_from(["p", "p", REFUSED]))
            steps = data.draw(st.integers(1, most_steps))
            world.add(f"x{next(names)}", cost, steps, prompt=prompt)
        world.run()
    return limit + 1


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    max_num_seqs=st.integers(1, 4),
    max_shapes=st.integers(1, 3),
    max_overtakes=st.integers(1, 4),
    cost=st.sampled_from(COSTS),
)
def test_nothing_starves(data, max_num_seqs, max_shapes, max_overtakes, cost):
    """See `commands_until_the_end` for the bound."""
    world = World(max_num_seqs=max_num_seqs, max_shapes=max_shapes, max_overtakes=max_overtakes)
    most_steps, ahead = 2, 3
    for i in range(ahead + max_num_seqs):
        world.add(f"before{i}", data.draw(st.sampled_from(COSTS)), most_steps)
    world.run()
    world.add("target", cost, most_steps)
    bound = commands_until_the_end(
        max_num_seqs, max_overtakes, most_steps, ahead, max(COSTS) / min(COSTS)
    )
    assert flood(data, world, "target", most_steps, bound) <= bound


@pytest.mark.parametrize(("max_overtakes", "starves"), [(4, False), (10**9, True)])
def test_without_the_bound_on_overtaking_it_would_starve(max_overtakes, starves):
    """The property above can fail: of two who are never done at the same time, one is always of
    the shape that others come with."""
    world = World(max_num_seqs=2, max_shapes=1, max_overtakes=max_overtakes)
    world.add("a", steps=3)
    world.run()
    world.run()
    world.add("b", steps=3)
    world.add("target", 2)
    bound = commands_until_the_end(2, 4, 3, 2, 2)
    for number in range(bound):
        while world.scheduler.counts()[1] < 4:
            world.add(f"x{number}-{world.scheduler.counts()[1]}", steps=3)
        world.run()
    assert ("target" not in world.ended) == starves


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
@pytest.mark.parametrize(("patience", "starves"), [(turns.PATIENCE, False), (10**9, True)])
def test_short_requests_that_come_and_go_do_not_hold_up_a_dear_one(monkeypatch, patience, starves):
    """Of three cheap shapes, with requests of one step, two are always here, one of them new. With
    patience without end the dear one starves: the bound is what the tests here hold on to."""
    bound = commands_until_the_end(3, 16, 3, 0, 30)
    monkeypatch.setattr(turns, "PATIENCE", patience)
    world = World(max_num_seqs=3, max_shapes=3)
    world.add("dear", 30, steps=3)
    names = count()
    for _ in range(bound):
        if "dear" in world.ended:
            break
        while world.scheduler.counts()[1] < 2:
            number = next(names)
            world.add(f"cheap{number}", 1 + number % 3, steps=1)
        world.run()
    assert ("dear" not in world.ended) == starves


def test_refused_requests_that_never_stop_coming_do_not_hold_up_steps():
    world = World(max_num_seqs=2)
    world.add("good", steps=3)
    for number in range(40):
        world.add(f"bad{number}", prompt=REFUSED)
    for _ in range(9):
        world.run()
    assert "good" in world.ended


def steps_in_order(world: World) -> list[str]:
    return [name for kind, members in world.executor.waves if kind == "step" for name in members]


def test_a_small_request_does_not_wait_for_a_large_one_to_end():
    world = World(max_num_seqs=2)
    world.add("large", 10, steps=10)
    world.run()
    world.run()
    world.add("small", 1, steps=10)
    world.drain()
    assert steps_in_order(world) == ["large"] + ["small"] * 10 + ["large"] * 9


def test_a_large_request_that_is_due_is_not_held_up():
    world = World(max_num_seqs=2)
    world.add("large", 10, steps=10)
    for _ in range(7):
        world.run()
    world.add("small", 1, steps=10)
    world.drain()
    assert steps_in_order(world) == ["large"] * 10 + ["small"] * 10


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
def test_requests_of_the_same_shape_do_not_hold_up_one_that_was_due_before_they_came():
    """Nor do they by taking part in the waves of one that came early."""
    world = World(max_num_seqs=3)
    world.add("long", 1, steps=40)
    world.add("other", 4, steps=10)
    for _ in range(31):
        world.run()
    world.add("late", 1, steps=40)
    world.drain()
    steps = steps_in_order(world)
    assert steps.index("late") > steps.index("other") + 9
