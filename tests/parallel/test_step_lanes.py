"""Which rank of a stage in step mode gets which request, and what becomes of it; no process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import InternalError, OmniError, OutOfMemoryError, StageLostError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.diffusion.batching import pack, unpack
from omnistage.diffusion.options import DiffusionOptions
from omnistage.diffusion.runtime import step_scheduler
from omnistage.diffusion.wave_data import nothing
from omnistage.diffusion.wave_step_data import aborted, unpack_shares
from omnistage.diffusion.wave_steps import ShareContext
from tests.diffusion.driver import RecordingContext, diffusion_stage
from tests.diffusion.fake_executor import FakeExecutor
from tests.diffusion.step_world import request

GATHERED = {"offload": "distributed-layerwise"}


class Ranks:
    """A scheduler and a fake executor a rank; `served` says on which rank each took its steps."""

    def __init__(self, data=2, sequence=1, max_num_seqs=2, **changes):
        parallel = ParallelConfig(data_parallel_size=data, sequence_parallel_size=sequence)
        world = parallel.world_size
        stage = diffusion_stage(
            "/nowhere",
            parallel=parallel,
            devices=("cpu",) * world,
            max_num_seqs=max_num_seqs,
            step_execution=True,
            diffusion_streaming_output=True,
            **changes,
        )
        self.scheduler = step_scheduler(stage, DiffusionOptions())
        self.executors = [FakeExecutor(max_num_seqs) for _ in range(world)]
        self.ended: dict[str, OmniError | None] = {}
        self.served: dict[str, set[int]] = {}
        self.last = []

    def add(self, name, **changes):
        self.scheduler.add(request(name, **changes))

    def abort(self, name):
        self.scheduler.abort((name, 0))
        self._release((name, 0))

    def run(self, fail=None):
        """`fail(place, name)`: what a share comes to instead of being carried out."""
        command = self.scheduler.next_command()
        if command is None:
            return False
        self.last = unpack_shares(command)
        if self.scheduler.one_kind:
            assert len({one.command.name for one in self.last}) == 1
        results = [self._results(rank, fail or (lambda *share: None)) for rank in self.places()]
        for emission in self.scheduler.complete(command, [pack(each) for each in results]):
            if emission.final:
                name = emission.identity.request_id
                assert name not in self.ended
                self.ended[name] = emission.error
                self._release(emission.identity.key)
        return True

    def drain(self):
        for _ in range(10_000):
            if not self.run():
                return
        raise AssertionError("it does not come to an end")

    def places(self):
        ranks = self.scheduler.ranks
        return {rank: place for place, own in enumerate(ranks) for rank in own}

    def _results(self, rank, fail):
        place = self.places()[rank]
        outcomes = []
        for share in self.last:
            name = share.command.name
            everywhere = self.scheduler.one_kind and name == "encode"
            if share.place != place and not everywhere:
                outcomes.append(nothing())
                continue
            outcome = fail(share.place, name) or self.executors[rank].execute(share.command)
            if name == "step":
                for one in share.command.identities:
                    self.served.setdefault(one.request_id, set()).add(place)
            outcomes.append(outcome)
        return outcomes

    def _release(self, key):
        for executor in self.executors:
            executor.release(key)


def names(ranks):
    return {
        one.place: [identity.request_id for identity in one.command.identities]
        for one in ranks.last
    }


@pytest.mark.invariant("PARALLEL-INV-005")
def test_a_request_goes_where_there_is_least_to_do():
    ranks = Ranks()
    for name in "abcde":
        ranks.add(name, steps=5)
    ranks.run()
    assert names(ranks) == {0: ["a", "c"], 1: ["b", "d"]}
    ranks.abort("b")
    ranks.run()
    assert [lane.holds(("e", 0)) for lane in ranks.scheduler.lanes] == [False, True]


@pytest.mark.invariant("PARALLEL-INV-005")
def test_lanes_do_different_things_in_one_command_unless_they_gather():
    for changes, expected in (({}, {"encode", "step"}), (GATHERED, {"encode"})):
        ranks = Ranks(**changes)
        ranks.add("a", steps=9)
        ranks.run()
        ranks.add("b", steps=9)
        ranks.run()
        assert {one.command.name for one in ranks.last} == expected


@pytest.mark.invariant("PARALLEL-INV-003")
def test_of_gathered_weights_every_rank_knows_every_request():
    ranks = Ranks(**GATHERED)
    for name in "ab":
        ranks.add(name)
    ranks.run()
    assert [set(executor.states) for executor in ranks.executors] == [{("a", 0), ("b", 0)}] * 2


@pytest.mark.invariant("PARALLEL-INV-005")
def test_a_share_that_fails_is_its_lanes_and_an_aborted_one_is_tried_again():
    ranks = Ranks(max_num_seqs=1)
    for name in "ab":
        ranks.add(name)
    ranks.run()
    error = OutOfMemoryError("no memory")
    ranks.run(lambda place, name: error if place == 0 else aborted())
    assert isinstance(ranks.ended.pop("a"), OutOfMemoryError)
    ranks.drain()
    assert ranks.ended == {"b": None}


@pytest.mark.invariant("PARALLEL-INV-006")
def test_ranks_of_one_lane_that_are_not_equally_far_lose_the_stage():
    ranks = Ranks(data=1, sequence=2)
    ranks.add("a")
    ranks.run()
    ranks.executors[1].states["a", 0].step = 2
    with pytest.raises(StageLostError, match="out of step"):
        ranks.run()


@pytest.mark.invariant("PARALLEL-INV-006")
def test_one_that_failed_beside_one_that_moved_loses_the_stage():
    ranks = Ranks(data=1, sequence=2)
    ranks.add("a")
    ranks.run()
    outcomes = iter([InternalError("on one rank"), None])
    with pytest.raises(StageLostError, match="out of step"):
        ranks.run(lambda place, name: next(outcomes))


@pytest.mark.invariant("PARALLEL-INV-005")
@settings(deadline=None, max_examples=60)
@given(
    st.booleans(),
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2)), max_size=8),
    st.lists(st.sampled_from(["run", "abort", "add", "memory", "fault"]), max_size=40),
)
def test_every_request_ends_once_and_stays_on_its_ranks(gathered, sequence, asked, events):
    ranks = Ranks(sequence=sequence, **(GATHERED if gathered else {}))
    waiting = {str(number): one for number, one in enumerate(asked)}
    gone = set()
    for event in [*events, *["add"] * len(waiting)]:
        if event == "add" and waiting:
            name, (cost, steps, previews) = waiting.popitem()
            ranks.add(name, cost=cost, steps=steps, partial_images=previews)
        elif event == "abort" and ranks.served:
            name = min(ranks.served.keys() - ranks.ended.keys() - gone, default=None)
            if name is not None:
                ranks.abort(name)
                gone.add(name)
        elif event in ("memory", "fault"):
            kind = OutOfMemoryError if event == "memory" else InternalError
            ranks.run(lambda place, name, kind=kind: kind("no") if place == 0 else None)
        else:
            ranks.run()
    ranks.drain()
    assert ranks.ended.keys() | gone == {str(number) for number in range(len(asked))}
    assert all(len(places) == 1 for places in ranks.served.values())
    assert ranks.scheduler.counts() == (0, 0)
    assert not any(executor.states for executor in ranks.executors)


class LateContext(RecordingContext):
    def finish_later(self, identity, work, lane="output"):
        self.operations.append(identity.request_id)


def late_share(rank):
    """A share of two outputs that are finished later, of which the second fails."""
    identities = tuple(RequestIdentity(request_id=name) for name in "ab")
    late = StageData(modality=Modality.IMAGE, fields={"late": True})
    command = Command(name="decode", identities=identities, data=nothing())
    context = LateContext(rank=rank)
    wave = ShareContext(context, frozenset(), leads=True)

    def fails():
        raise InternalError("its numbers are not finite")

    picture = StageData(modality=Modality.IMAGE, fields={"of": "a"})
    for identity, work in zip(identities, (lambda: picture, fails), strict=True):
        wave.finish_later(identity, work)
    assert context.operations == []
    return context, unpack(wave.completed(command, pack([late, late])))


@pytest.mark.invariant("PARALLEL-INV-005")
def test_late_outputs_are_the_first_ranks_and_come_at_once_from_others():
    context, parts = late_share(rank=0)
    assert context.operations == ["a", "b"]
    assert [one.fields for one in parts] == [{"late": True}] * 2
    context, parts = late_share(rank=1)
    assert context.operations == []
    assert parts[0].fields == {"of": "a"}
    assert isinstance(parts[1], InternalError)
