"""Which requests a wave takes, and what becomes of a share or a wave that fails; no process."""

from __future__ import annotations

import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import InternalError, OutOfMemoryError, StageLostError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.diffusion.batching import pack
from omnistage.diffusion.options import DiffusionOptions
from omnistage.diffusion.runtime import request_scheduler
from omnistage.diffusion.wave_data import failed_share, nothing, share_of
from omnistage.diffusion.waves import WaveRules
from tests.diffusion.driver import diffusion_request, diffusion_stage

DATA = {"data_parallel_size": 2}


def scheduler(max_num_seqs=1, parallel=DATA, **changes):
    config = ParallelConfig(**parallel)
    stage = diffusion_stage(
        "/nowhere",
        parallel=config,
        devices=("cpu",) * config.world_size,
        max_num_seqs=max_num_seqs,
        **changes,
    )
    return request_scheduler(stage, DiffusionOptions())


def add(scheduler, **steps):
    for name, count in steps.items():
        scheduler.add(diffusion_request(request_id=name, num_inference_steps=count))


def names(command):
    return [one.request_id for one in command.identities]


def sizes(command):
    return command.data.fields["share_sizes"]


def result(*requests):
    return pack([StageData(modality=Modality.IMAGE, fields={"of": name}) for name in requests])


def ends(emissions):
    return {
        one.identity.request_id: one.error or one.data.fields["of"]
        for one in emissions
        if one.final
    }


GATHERED = {"offload": "distributed-layerwise"}
SHARES = [
    ({}, {"a": 2}, ["a"], [1]),
    ({}, {"a": 2, "b": 2}, ["a", "b"], [1, 1]),
    ({}, {"a": 2, "b": 3, "c": 2}, ["a", "b"], [1, 1]),
    ({"max_num_seqs": 2}, {"a": 2, "b": 2}, ["a", "b"], [1, 1]),
    ({"max_num_seqs": 2}, {"a": 2, "b": 2, "c": 2}, ["a", "b", "c"], [2, 1]),
    ({"max_num_seqs": 2}, {"a": 2, "b": 3, "c": 2}, ["a", "c", "b"], [2, 1]),
    ({"max_num_seqs": 4}, dict.fromkeys("abcde", 2), list("abdce"), None),
    (GATHERED, {"a": 2, "b": 3, "c": 2}, ["a", "c"], [1, 1]),
    (GATHERED, {"a": 2, "b": 3}, ["a"], [1]),
]


@pytest.mark.invariant("PARALLEL-INV-005")
@pytest.mark.parametrize(("changes", "asked", "taken", "split"), SHARES)
def test_shares_of_a_wave(changes, asked, taken, split):
    ours = scheduler(**changes)
    add(ours, **asked)
    command = ours.next_command()
    assert sorted(names(command)) == sorted(taken)
    assert not command.lockstep
    if split is not None:
        assert (names(command), sizes(command)) == (taken, split)
    assert max(sizes(command)) - min(sizes(command)) <= 1
    assert ours.next_command() is None


@pytest.mark.invariant("PARALLEL-INV-005")
def test_each_share_reaches_its_rank_and_its_result_comes_back():
    ours = scheduler(max_num_seqs=2)
    add(ours, a=2, b=3, c=2)
    command = ours.next_command()
    first, second = (share_of(command, place, fill=False) for place in (0, 1))
    assert [names(one.command) for one in (first, second)] == [["a", "c"], ["b"]]
    parts = second.command.data.fields["parts"]
    assert [part["fields"]["params"]["num_inference_steps"] for part in parts] == [3]
    done = ours.complete(command, [result("a", "c"), result("b")])
    assert ends(done) == {"a": "a", "b": "b", "c": "c"}
    assert ours.counts() == (0, 0)


@pytest.mark.invariant("PARALLEL-INV-003")
def test_a_rank_without_a_share_is_idle_or_runs_anothers():
    ours = scheduler()
    add(ours, a=2)
    command = ours.next_command()
    assert share_of(command, 1, fill=False) is None
    filled = share_of(command, 1, fill=True)
    assert names(filled.command) == ["a"]
    assert not filled.is_own
    assert ends(ours.complete(command, [result("a"), nothing()])) == {"a": "a"}


@pytest.mark.invariant("PARALLEL-INV-005")
def test_results_are_those_of_the_ranks_that_lead_a_sequence():
    ours = scheduler(parallel={"data_parallel_size": 2, "sequence_parallel_size": 2})
    assert ours.rules == WaveRules(leaders=(0, 2), lockstep="sequence")
    add(ours, a=2, b=2)
    results = [result("a"), nothing(), result("b"), nothing()]
    assert ends(ours.complete(ours.next_command(), results)) == {"a": "a", "b": "b"}


@pytest.mark.invariant("PARALLEL-INV-005")
def test_a_share_that_fails_is_tried_again_in_halves_and_learns_its_limit():
    ours = scheduler(max_num_seqs=2)
    add(ours, a=2, b=2, c=2, d=2)
    command = ours.next_command()
    assert sizes(command) == [2, 2]
    failed = failed_share(OutOfMemoryError("no memory"))
    assert ends(ours.complete(command, [failed, result("c", "d")])) == {"c": "c", "d": "d"}
    add(ours, e=2, f=2)
    for name in ("a", "b"):
        again = ours.next_command()
        assert names(again) == [name]
        ours.complete(again, [result(name), nothing()])
    assert sizes(ours.next_command()) == [1, 1]


@pytest.mark.invariant("PARALLEL-INV-005")
def test_a_wave_that_fails_is_tried_again_share_by_share():
    ours = scheduler(**GATHERED)
    add(ours, a=2, b=2)
    assert not ours.fail(ours.next_command(), InternalError("a rank failed"))
    first = ours.next_command()
    assert names(first) == ["a"]
    error = InternalError("again")
    assert ends(ours.fail(first, error)) == {"a": error}
    assert names(ours.next_command()) == ["b"]


@pytest.mark.invariant("PARALLEL-INV-006")
def test_after_a_lost_stage_nothing_is_tried_again():
    ours = scheduler(max_num_seqs=2)
    add(ours, a=2, b=2, c=2)
    error = StageLostError("gone")
    assert ends(ours.fail(ours.next_command(), error)) == dict.fromkeys("abc", error)


@pytest.mark.invariant("PARALLEL-INV-004")
def test_one_rank_gets_commands_as_ever():
    ours = scheduler(parallel={})
    add(ours, a=2)
    command = ours.next_command()
    assert command.lockstep
    assert "share_sizes" not in command.data.fields
