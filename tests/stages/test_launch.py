"""Child processes: how they get their orders, and that they end with their parent."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from omnistage.contracts.errors import ConfigurationError
from omnistage.stages.imports import load_object
from omnistage.stages.launch import (
    LIFELINE_LOST_EXIT_CODE,
    RANK_LOST_EXIT_CODE,
    RankLaunch,
    describe_exit,
    encode_launch,
    start_child,
)
from tests.toy.deployment import toy_config
from tests.toy.leaks import nothing_left

CHILD = "tests.stages.echo_child"


def launch_of(padding: int = 0) -> RankLaunch:
    return RankLaunch(
        endpoint="nowhere",
        token="x" * padding,
        stage=toy_config(ranks=1).stages[0],
        replica_id=3,
        rank=1,
        world_size=2,
        sys_path=tuple(sys.path),
    )


def test_a_record_larger_than_a_pipe_arrives() -> None:
    with nothing_left():
        codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        start_child(CHILD, launch_of(padding=1_000_000), codes.put)
        assert codes.get(timeout=20) == 33, "the child answers by its exit code"


def test_a_child_that_dies_before_it_reads_is_reported() -> None:
    with nothing_left():
        codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        child = start_child("tests.stages.no_such_module", launch_of(1_000_000), codes.put)
        assert codes.get(timeout=20) == 1
        assert child.wait(1) == 1


@pytest.mark.parametrize(("users", "childs"), [(None, b"PASSIVE"), ("ACTIVE", b"ACTIVE")])
def test_idle_threads_of_a_child_spin_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch, users: str | None, childs: bytes
) -> None:
    """Unless the user says otherwise."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    with nothing_left():
        codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        child = start_child(CHILD, launch_of(padding=1), codes.put)
        environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
        assert b"OMP_WAIT_POLICY=" + childs in environment
        assert (b"GOMP_SPINCOUNT=3000" in environment) == (users is None)
        assert codes.get(timeout=20) == 33


@pytest.mark.parametrize(("users", "childs"), [(None, b"1"), ("0", b"0")])
def test_a_child_asks_for_large_pages(
    monkeypatch: pytest.MonkeyPatch, users: str | None, childs: bytes
) -> None:
    """Unless the user says otherwise."""
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if users is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", users)
    with nothing_left():
        codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        child = start_child(CHILD, launch_of(padding=1), codes.put)
        environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
        assert b"THP_MEM_ALLOC_ENABLE=" + childs in environment
        assert codes.get(timeout=20) == 33


@pytest.mark.invariant("STAGE-INV-205")
def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = (
        "import sys, time\n"
        "from tests.stages.test_launch import launch_of\n"
        "from omnistage.stages.launch import start_child\n"
        f"print(start_child({CHILD!r}, launch_of(0), print).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with nothing_left():
        process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        give_up = time.monotonic() + 20
        while child.is_running() and child.status() != "zombie":
            assert time.monotonic() < give_up, "the child outlives its parent"
            time.sleep(0.01)


def test_exits_are_described_for_people() -> None:
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-40) == "killed by signal 40"
    assert describe_exit(5) == "exit code 5"
    assert "parent" in describe_exit(LIFELINE_LOST_EXIT_CODE)
    assert "rank" in describe_exit(RANK_LOST_EXIT_CODE)
    assert encode_launch(launch_of(10))[8:] != b""


@pytest.mark.parametrize(
    "path", ["nothing", "a:", ":b", "no_such_module_x:y", "omnistage.stages.pool:Nothing"]
)
def test_import_strings_that_lead_nowhere_are_configuration_errors(path: str) -> None:
    with pytest.raises(ConfigurationError, match=path.split(":")[0] or "import string"):
        load_object(path)
    assert load_object("omnistage.stages.pool:StagePool").__name__ == "StagePool"
