"""Step mode decides who takes part in which command: order, fairness, ends."""

from __future__ import annotations

from collections import Counter
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnistage.contracts.errors import InternalError, OutOfMemoryError, StageLostError
from omnistage.diffusion.active import preview_steps
from tests.diffusion.fake_executor import REFUSED
from tests.diffusion.step_world import COSTS, World

# whatever happens -----------------------------------------------------------------------------


class Schedules(RuleBasedStateMachine):
    """Joins, aborts, failures, credits and late outputs in any order."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.world = World(late=self.late, max_num_seqs=3, max_shapes=2, max_overtakes=2)
        self.names = count()
        self.aborted: set[str] = set()
        self.all: set[str] = set()

    @rule(
        cost=st.sampled_from(COSTS),
        steps=st.integers(1, 4),
        priority=st.integers(0, 1),
        partial_images=st.integers(0, 3),
        credits=st.none() | st.integers(0, 3),
        prompt=st.sampled_from(["p", "p", "p", REFUSED]),
    )
    def join(self, cost, steps, credits, **changes) -> None:
        name = f"r{next(self.names)}"
        self.all.add(name)
        self.world.add(name, cost, steps, credits=credits, **changes)

    @rule(error=st.none() | st.sampled_from([InternalError, OutOfMemoryError]), moved=st.sets(
        st.integers(0, 2)
    ))  # fmt: skip
    def run(self, error, moved) -> None:
        self.world.run(error and error("injected"), moved)

    @rule()
    def run_well(self) -> None:
        self.world.run()

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.open)))
        self.aborted.add(name)
        self.world.abort(name)

    @precondition(lambda self: self.world.open & self.world.credits.keys())
    @rule(data=st.data())
    def read_one(self, data) -> None:
        names = sorted(self.world.open & self.world.credits.keys())
        self.world.give_credits(data.draw(st.sampled_from(names)), 1)

    @precondition(lambda self: self.world.executor.pending)
    @rule(fails=st.booleans())
    def deliver(self, fails) -> None:
        self.world.deliver(InternalError("late") if fails else None)

    @invariant()
    def nobody_is_lost(self) -> None:
        running, waiting = self.world.scheduler.counts()
        assert running + waiting == len(self.world.open)

    def teardown(self) -> None:
        """Whoever is left ends once its reader reads."""
        for _ in range(5):
            for name in sorted(self.world.open & self.world.credits.keys()):
                self.world.give_credits(name, 5)
            self.world.drain()
        assert self.world.scheduler.counts() == (0, 0)
        assert self.world.ended.keys() == self.all - self.aborted
        assert self.world.executor.states == {}
        for indices in self.world.previews.values():
            assert indices == list(range(len(indices)))


class LateSchedules(Schedules):
    late = True


EXAMPLES = settings(max_examples=60, stateful_step_count=40, deadline=None)
Schedules.TestCase.settings = LateSchedules.TestCase.settings = EXAMPLES


@pytest.mark.invariant("DIFF-RUNTIME-INV-001")
class TestSchedules(Schedules.TestCase):
    """Every request that is not aborted ends exactly once, and nothing is left."""


@pytest.mark.invariant("DIFF-RUNTIME-INV-040")
class TestLateSchedules(LateSchedules.TestCase):
    """The same with outputs that are finished beside the next commands."""


# admission ------------------------------------------------------------------------------------


def test_order_is_priority_then_arrival():
    world = World(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("later", -1)):
        world.add(name, priority=priority, steps=1)
    world.drain()
    assert list(world.ended) == ["urgent", "a", "b", "later"]


@pytest.mark.invariant("DIFF-RUNTIME-INV-041")
@pytest.mark.parametrize("max_overtakes", [1, 2, 5])
@pytest.mark.parametrize("max_num_seqs", [2, 4])
def test_admission_looks_past_another_shape_so_often_and_no_more(max_overtakes, max_num_seqs):
    world = World(max_num_seqs=max_num_seqs, max_shapes=1, max_overtakes=max_overtakes)
    world.add("first", 1, steps=50)
    world.run()
    world.add("other", 2, steps=1)
    for i in range(12):
        world.add(f"same{i}", 1, steps=1)
    world.drain()
    assert list(world.ended)[: max_overtakes + 1] == [
        *(f"same{i}" for i in range(max_overtakes)),
        "first",
    ]
    encoded = [
        name for kind, members in world.executor.waves if kind == "encode" for name in members
    ]
    assert encoded.index("other") == max_overtakes + 1


def test_as_many_shapes_as_allowed_run_beside_each_other():
    world = World(max_num_seqs=8, max_shapes=2)
    for name, cost in (("a", 1), ("b", 2), ("c", 3), ("a2", 1), ("b2", 2)):
        world.add(name, cost, steps=3)
    world.run()
    assert world.executor.waves == [("encode", ("a", "b", "a2", "b2"))]


@pytest.mark.invariant("DIFF-RUNTIME-INV-042")
def test_requests_join_between_steps_and_share_them():
    world = World(max_num_seqs=3)
    world.add("a", steps=3)
    world.run()
    world.run()
    world.add("b", steps=2)
    world.drain()
    steps = [members for name, members in world.executor.waves if name == "step"]
    assert steps == [("a",), ("a", "b"), ("a", "b")]
    assert world.executor.waves[-1] == ("decode", ("a", "b"))


# failures -------------------------------------------------------------------------------------


@pytest.mark.invariant("DIFF-RUNTIME-INV-045")
def test_a_failure_of_a_batch_is_found_by_running_each_alone_once():
    world = World(max_num_seqs=3)
    for name in "abc":
        world.add(name, steps=2)
    world.run()
    world.run(InternalError("somebody's"))
    assert world.run() == ("step", ("a",))
    assert world.run(InternalError("b's")) == ("step", ("b",))
    assert world.ended.keys() == {"b"}
    assert world.run() == ("step", ("c",))
    assert world.run() == ("step", ("a", "c")), "together again"
    world.drain()
    assert {name: error is None for name, error in world.ended.items()} == {
        "a": True, "b": False, "c": True,
    }  # fmt: skip


@pytest.mark.invariant("DIFF-RUNTIME-INV-046")
def test_batches_stay_below_what_did_not_fit_while_the_shape_is_here():
    world = World(max_num_seqs=8)
    for i in range(8):
        world.add(f"a{i}", 1, steps=3)
        world.add(f"b{i}", 2, steps=3)
    sizes = []
    while world.scheduler.counts() != (0, 0):
        command = world.scheduler.next_command()
        size = len(command.identities)
        if command.name == "step" and size > 3:
            sizes.append(size)
            world.scheduler.fail(command, OutOfMemoryError("injected"))
            continue
        world._emit(world.scheduler.complete(command, [world.executor.execute(command)]))
    assert set(world.ended.values()) == {None}
    assert len(sizes) <= 4, f"each shape learns it once: {sizes}"
    world.add("again", 1)
    for i in range(7):
        world.add(f"again{i}", 1)
    world.run()
    assert len(world.run()[1]) == 8, "the limit has left with the shape"


def test_a_lost_stage_is_nobodys_second_chance():
    world = World(max_num_seqs=2)
    world.add("a")
    world.add("b")
    world.run(StageLostError("gone"))
    assert world.ended.keys() == {"a", "b"}


@settings(max_examples=60, deadline=None)
@given(moved=st.sets(st.integers(0, 2)), error=st.sampled_from([InternalError, OutOfMemoryError]))
def test_whoever_moved_before_a_failure_moves_no_second_time(moved, error):
    """The executor asserts that nobody takes a step too many."""
    world = World(max_num_seqs=3)
    for name in "abc":
        world.add(name, steps=3)
    world.run()
    world.run(error("halfway"), moved)
    world.drain()
    assert set(world.ended.values()) == {None}


# previews and credits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "steps", "expected"), [(0, 4, []), (3, 4, [1, 2, 3]), (2, 20, [7, 13]), (3, 2, [1])]
)
def test_previews_are_spread_evenly_and_before_the_end(count, steps, expected):
    assert preview_steps(count, steps) == expected


@pytest.mark.parametrize("late", [False, True])
def test_a_preview_leaves_the_last_credit_for_the_result(late):
    world = World(late=late, max_num_seqs=1)
    world.add("a", steps=4, partial_images=3, credits=2)
    world.drain()
    assert world.previews["a"] == [0]
    assert world.ended == {"a": None}


@pytest.mark.invariant("DIFF-RUNTIME-INV-040")
def test_previews_that_were_held_back_are_shown_once():
    world = World(max_num_seqs=1)
    world.add("a", steps=4, partial_images=3, credits=1)
    for _ in range(4):
        world.run()
    world.give_credits("a", 3)
    world.drain()
    assert world.previews["a"] == [0], "after step 3: one picture, not three equal ones"
    assert world.ended == {"a": None}


@pytest.mark.invariant("DIFF-RUNTIME-INV-040")
def test_who_waits_for_its_reader_holds_nobody_up():
    world = World(max_num_seqs=1, max_shapes=1)
    world.add("slow", 1, steps=1, credits=1)
    world.run()
    world.give_credits("slow", -1)
    world.run()
    world.add("other", 2, steps=1)
    world.drain()
    assert world.ended == {"other": None}
    world.give_credits("slow", 1)
    world.drain()
    assert world.ended == {"other": None, "slow": None}


def test_steps_come_in_whole_waves_of_all_that_are_here():
    """No wave leaves somebody of its shape behind."""
    world = World(max_num_seqs=4)
    for i in range(4):
        world.add(f"r{i}", steps=2 + i)
    world.drain()
    steps = [set(members) for name, members in world.executor.waves if name == "step"]
    assert all(later <= earlier for earlier, later in pairwise(steps))
    assert Counter(name for wave in steps for name in wave) == {f"r{i}": 2 + i for i in range(4)}
