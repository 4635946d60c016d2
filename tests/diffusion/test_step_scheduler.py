"""Step mode decides who takes part in which command: order, fairness, ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnistage.contracts.errors import InternalError, OmniError, OutOfMemoryError, StageLostError
from omnistage.diffusion.active import preview_steps
from omnistage.diffusion.batching import shape_key
from omnistage.diffusion.queue import WaitingQueue
from omnistage.diffusion.step_scheduler import StepScheduler
from tests.diffusion.driver import diffusion_request
from tests.diffusion.fake_executor import REFUSED, FakeExecutor

COSTS = (1, 2, 3)


def make_scheduler(**settings) -> StepScheduler:
    queue = WaitingQueue(capacity=10_000, defaults={}, batch_key=shape_key, clock=lambda: 0.0)
    return StepScheduler(queue, **settings)


def request(name: str, cost: int = 1, steps: int = 2, **changes):
    return diffusion_request(
        **{"prompt": "p", **changes}, request_id=name, height=16 * cost, num_inference_steps=steps
    )


class World:
    """A scheduler, its executor, and what became of each request; emits as a replica does."""

    def __init__(self, *, late: bool = False, **settings) -> None:
        self.scheduler = make_scheduler(**settings)
        self.executor = FakeExecutor(settings.get("max_num_seqs", 1), late=late)
        self.ended: dict[str, OmniError | None] = {}
        self.previews: dict[str, list] = defaultdict(list)
        self.credits: dict[str, int] = {}
        self.open: set[str] = set()

    def add(self, name: str, *args, credits: int | None = None, **changes) -> None:
        self.scheduler.add(request(name, *args, **changes))
        self.open.add(name)
        if credits is not None:
            self.give_credits(name, credits)

    def give_credits(self, name: str, number: int) -> None:
        self.credits[name] = self.credits.get(name, 0) + number
        self.scheduler.set_credits((name, 0), self.credits[name])

    def abort(self, name: str) -> None:
        self.scheduler.abort((name, 0))
        self.executor.release((name, 0))
        self.open.discard(name)

    def run(self, error: OmniError | None = None, moved=()) -> tuple[str, tuple[str, ...]] | None:
        command = self.scheduler.next_command()
        if command is None:
            return None
        if error is not None:
            self.executor.fail_halfway(command, moved)
            self._emit(self.scheduler.fail(command, error))
            return command.name, tuple(one.request_id for one in command.identities)
        self._emit(self.scheduler.complete(command, [self.executor.execute(command)]))
        return self.executor.waves[-1]

    def deliver(self, error: OmniError | None = None) -> None:
        identity, data = self.executor.pending.pop(0)
        self._emit(self.scheduler.deliver(identity, error or data))

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if self.run() is None:
                if not self.executor.pending:
                    return
                self.deliver()
        raise AssertionError("it does not come to an end")

    def _emit(self, emissions) -> None:
        for emission in emissions:
            name = emission.identity.request_id
            assert name in self.open, f"{name} ended already"
            if emission.data is not None and name in self.credits:
                assert self.credits[name] > 0, f"{name} has no credit left"
                self.credits[name] -= 1
            if emission.final:
                self.ended[name] = emission.error
                self.open.discard(name)
                self.executor.release(emission.identity.key)
            else:
                self.previews[name].append(emission.data.fields["partial_image_index"])
                if name in self.credits:
                    self.scheduler.set_credits(emission.identity.key, self.credits[name])


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


# fairness -------------------------------------------------------------------------------------


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
    """Two cheap shapes of one step each take turns in coming: one of them is always new."""
    world = World(max_num_seqs=3, max_shapes=3)
    world.add("dear", 30, steps=3)
    for number in range(500):
        if "dear" in world.ended:
            break
        if world.scheduler.counts()[1] == 0:
            world.add(f"cheap{number}", 1 + number % 2, steps=1)
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
