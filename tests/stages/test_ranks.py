"""Leader and ranks: one order of commands, one answer to who is cancelled, one failure unit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OmniError,
    StageLostError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.observability.logging import LogSettings
from omnistage.stages.ranks import RankGroup
from tests.toy.deployment import toy_config
from tests.toy.leaks import nothing_left

ME = RequestIdentity(request_id="r")
LIMIT_S = 20.0
QUIET = LogSettings(level="critical")


def command(**piece: object) -> Command:
    """One toy piece; a rank passes two checkpoints on its way."""
    fields = {"pieces": [{"index": 0, **piece}]}
    tensors = {"0.x": np.ones(4, dtype=np.float32)}
    data = StageData(modality=Modality.HIDDEN, fields=fields, tensors=tensors)
    return Command(name="scale", identities=(ME,), data=data)


@pytest.fixture
def group() -> Iterator[RankGroup]:
    with nothing_left():
        stage = toy_config(ranks=2).stages[0]
        group = RankGroup(stage, 0, QUIET, lambda rank, code: None)
        try:
            group.begin_load()
            group.finish_load()
            yield group
        finally:
            group.stop()
            group.stop()


def finish(group: RankGroup) -> StageData | OmniError:
    group.verdict(0, ())
    group.verdict(1, ())
    (result,) = group.gather(LIMIT_S)
    return result


def wait_for_early_error(group: RankGroup) -> None:
    give_up = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up:
        group.raise_early_error()
        time.sleep(0.001)


def run_once(group: RankGroup) -> None:
    group.broadcast(command())
    finish(group)


@pytest.mark.invariant("STAGE-INV-208")
def test_every_command_has_its_own_result_in_order(group: RankGroup) -> None:
    for _ in range(3):
        group.broadcast(command())
        result = finish(group)
        assert isinstance(result, StageData)
        assert list(result.tensors["0.x"].numpy()) == [2.0, 2.0]
        group.release(ME.key)


@pytest.mark.invariant("STAGE-INV-208")
def test_an_abandoned_command_leaves_the_next_one_untouched(group: RankGroup) -> None:
    group.broadcast(command())
    group.abandon()
    (result,) = group.gather(LIMIT_S)
    assert isinstance(result, OmniError)
    assert result.type == "cancelled"
    group.broadcast(command())
    assert isinstance(finish(group), StageData)
    group.abandon()  # Too late for the command that is over.
    group.broadcast(command())
    assert isinstance(finish(group), StageData)


@pytest.mark.invariant("STAGE-INV-208")
def test_a_rank_that_fails_early_is_heard_before_its_turn(group: RankGroup) -> None:
    fault = {"kind": "invalid", "at": 0, "stage": 0, "rank": 1}
    group.broadcast(command(fault=fault))
    group.verdict(0, ())
    with pytest.raises(InvalidRequestError, match="refuses"):
        wait_for_early_error(group)
    group.verdict(1, ())  # The leader went on for a while: the rank ignores it.
    (result,) = group.gather(LIMIT_S)
    assert isinstance(result, InvalidRequestError)
    group.broadcast(command())
    assert isinstance(finish(group), StageData)


@pytest.mark.invariant("STAGE-INV-208")
def test_a_verdict_out_of_order_ends_the_rank(group: RankGroup) -> None:
    group.broadcast(command())
    group.verdict(7, ())
    with pytest.raises(StageLostError, match="died"):
        group.gather(LIMIT_S)


def test_data_that_cannot_travel_reaches_no_rank(group: RankGroup) -> None:
    bad = command()
    bad.data.fields["secret"] = object()
    with pytest.raises(InvalidRequestError):
        group.broadcast(bad)
    group.broadcast(command())
    assert isinstance(finish(group), StageData)


def test_an_answer_to_another_command_is_an_error(group: RankGroup) -> None:
    group.broadcast(command())
    group.verdict(0, ())
    group.verdict(1, ())
    with pytest.raises(InternalError, match="out of order"):
        group._remotes[0].result(99, LIMIT_S)


@pytest.mark.invariant("STAGE-INV-202")
def test_a_dead_rank_is_a_lost_stage_with_its_reason(group: RankGroup) -> None:
    os.kill(group.pids[0], signal.SIGKILL)
    group._remotes[0].process.wait(LIMIT_S)
    with pytest.raises(StageLostError, match="SIGKILL"):
        run_once(group)


def test_ranks_that_do_not_listen_are_ended_by_force(group: RankGroup) -> None:
    os.kill(group.pids[0], signal.SIGSTOP)
    remote = group._remotes[0]
    remote.ask_to_stop()
    remote.end(time.monotonic() + 0.1)
    assert remote.process.returncode == -signal.SIGKILL


def test_a_rank_that_cannot_load_says_why() -> None:
    with nothing_left():
        stage = toy_config(ranks=2, options={"load_error": "no such file"}).stages[0]
        group = RankGroup(stage, 0, QUIET, lambda rank, code: None)
        try:
            group.begin_load()
            with pytest.raises(InvalidRequestError, match="no such file"):
                group.finish_load()
        finally:
            group.stop()


def test_a_rank_that_is_refused_says_why_without_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with nothing_left():
        stage = toy_config(ranks=2).stages[0]
        topology = replace(stage.stage, runtime="tests.stages.odd_runtime:RefusingRuntime")
        group = RankGroup(replace(stage, stage=topology), 0, QUIET, lambda rank, code: None)
        try:
            group.begin_load()
            with pytest.raises(UnsupportedCombinationError, match="no rank 1 here"):
                group.finish_load()
            assert group._remotes[0].process.poll() is None, "its end would hide its reason"
        finally:
            group.stop()
    assert capfd.readouterr().err == ""
