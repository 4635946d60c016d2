"""What a rank of a lockstep wave does with the votes of the others; no process."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import StageLostError, UnavailableError
from omnistage.contracts.identity import RequestIdentity
from omnistage.diffusion.wave_runner import WaveContext
from omnistage.parallel.agreement import Vote
from tests.diffusion.driver import RecordingContext

ME, OTHER = (RequestIdentity(request_id=name) for name in ("req", "other"))


class OtherRank:
    """Votes as it is told, one by one; `heard` is what this rank said."""

    timeout_s = 1.0

    def __init__(self, *votes: Vote) -> None:
        self.votes = list(votes)
        self.heard: list[Vote] = []

    def vote(self, own, limit_s=None):
        self.heard.append(own)
        both = (own, self.votes.pop(0))
        return min(both), max(both)


def stepping(*votes, cancel_at=None, bound=(ME,)):
    other = OtherRank(*votes)
    wave = WaveContext(RecordingContext(cancel_at=cancel_at), other, (ME,), bound)
    wave.operation("step")
    return wave, other


@pytest.mark.invariant("PARALLEL-INV-003")
def test_ranks_vote_before_steps_only_and_compiling_is_a_step():
    other = OtherRank(Vote.GO_ON, Vote.GO_ON, Vote.DONE)
    wave = WaveContext(RecordingContext(), other, (ME,), (ME,))
    for phase in ("encode", "step", "compile", "decode"):
        wave.operation(phase)
        assert wave.checkpoint() == frozenset()
    wave.done()
    assert other.heard == [Vote.GO_ON, Vote.GO_ON, Vote.DONE]


@pytest.mark.invariant("PARALLEL-INV-003")
def test_one_rank_stops_all():
    wave, _ = stepping(Vote.STOP)
    assert wave.checkpoint() == {ME.key}
    wave.failed()  # All know: no further vote.


@pytest.mark.invariant("PARALLEL-INV-003")
def test_a_cancelled_request_of_a_wave_goes_on_beside_the_others():
    wave, other = stepping(Vote.GO_ON, cancel_at=0, bound=(ME, OTHER))
    assert wave.checkpoint() == frozenset()
    assert other.heard == [Vote.GO_ON]
    wave, other = stepping(Vote.GO_ON, cancel_at=0)
    assert wave.checkpoint() == {ME.key}
    assert other.heard == [Vote.STOP]


@pytest.mark.invariant("PARALLEL-INV-003")
@pytest.mark.parametrize("step", ["checkpoint", "done"])
def test_a_fault_elsewhere_ends_the_wave_here(step):
    wave, _ = stepping(Vote.FAILED)
    with pytest.raises(UnavailableError, match="another rank"):
        getattr(wave, step)()
    assert wave.finished


@pytest.mark.invariant("PARALLEL-INV-003")
@pytest.mark.parametrize(("step", "vote"), [("checkpoint", Vote.DONE), ("done", Vote.GO_ON)])
def test_ranks_out_of_step_lose_the_stage(step, vote):
    wave, _ = stepping(vote)
    with pytest.raises(StageLostError, match="out of step"):
        getattr(wave, step)()
