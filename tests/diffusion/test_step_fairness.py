"""Step mode is fair: nothing starves, and requests get equal shares of the device."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.contracts.errors import OutOfMemoryError
from tests.diffusion.fake_executor import REFUSED
from tests.diffusion.step_world import COSTS, World


def commands_until_the_end(max_num_seqs, max_overtakes, most_steps, ahead, cost_ratio) -> int:
    """At most so many commands pass until a request of equal priority has ended, whatever arrives.

    N `max_num_seqs`, K `max_overtakes`, S steps of the longest, A requests ahead of it, r the ratio
    of the dearest step to the cheapest. No previews, no failures.

    Until it is admitted only the N that run, the A ahead and the K that overtake it are served, and
    each command serves at least one of them, each S + 2 times: (N + A + K)(S + 2).

    Then its shape has had x and takes a step again when nobody present has had less than x + c, c
    its cost. Nobody present has had less than x, and newcomers start at the shared time t >= x,
    which a wave of cost w moves by at least w / N. So t passes x + c after N r waves; from then on
    newcomers come behind, and the at most N shapes present take r + 1 waves each at most. Between
    two of its steps there are B = N r + N (r + 1) other waves. With each wave come at most one
    encoding and N decodes. In all (S + 1)(B + 1)(N + 2), its encoding and its decode included.
    """
    n, s, r = max_num_seqs, most_steps, cost_ratio
    others = n * r + n * (r + 1)
    return (n + ahead + max_overtakes) * (s + 2) + (s + 1) * (others + 1) * (n + 2)


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
    assert flood(data, world, "target", most_steps, int(bound)) <= bound


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
    bound = int(commands_until_the_end(2, 4, 3, 2, 2))
    for number in range(bound):
        while world.scheduler.counts()[1] < 4:
            world.add(f"x{number}-{world.scheduler.counts()[1]}", steps=3)
        world.run()
    assert ("target" not in world.ended) == starves


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
def test_short_requests_that_come_and_go_do_not_hold_up_a_dear_one():
    """Of three cheap shapes, with requests of one step, two are always here, one of them new."""
    world = World(max_num_seqs=3, max_shapes=3)
    world.add("dear", 30, steps=3)
    names = count()
    for _ in range(1500):
        if "dear" in world.ended:
            break
        while world.scheduler.counts()[1] < 2:
            number = next(names)
            world.add(f"cheap{number}", 1 + number % 3, steps=1)
        world.run()
    assert "dear" in world.ended


def test_refused_requests_that_never_stop_coming_do_not_hold_up_steps():
    world = World(max_num_seqs=2)
    world.add("good", steps=3)
    for number in range(40):
        world.add(f"bad{number}", prompt=REFUSED)
    for _ in range(9):
        world.run()
    assert "good" in world.ended


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
@settings(max_examples=40, deadline=None)
@given(
    crowd=st.dictionaries(st.sampled_from((1, 2, 3, 7)), st.integers(1, 3), min_size=2),
    waves=st.integers(20, 120),
    fits=st.integers(1, 3),
)
def test_every_request_gets_an_equal_share_of_the_device(crowd, waves, fits):
    """What the requests of two shapes have had of it, on average, never differs by more than the
    dearest step; also where only `fits` of a shape can step together."""
    world = World(max_num_seqs=12, max_shapes=4)
    for cost, number in crowd.items():
        for i in range(number):
            world.add(f"{cost}-{i}", cost, steps=1000)
    world.run()
    had = Counter()
    for _ in range(waves):
        command = world.scheduler.next_command()
        if len(command.identities) > fits:
            assert not tuple(world.scheduler.fail(command, OutOfMemoryError("injected")))
            continue
        world.scheduler.complete(command, [world.executor.execute(command)])
        cost = int(command.identities[0].request_id.partition("-")[0])
        had[cost] += cost * len(command.identities) / crowd[cost]
        shares = [had[one] for one in crowd]
        assert max(shares) - min(shares) <= max(crowd) + 1e-9
