"""Where ranks meet: on loopback, at a port that nobody chose, gone after `close`."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from omnistage.parallel.rendezvous import Rendezvous, connect


@pytest.mark.invariant("PARALLEL-INV-006")
def test_two_stores_are_apart_and_end_with_their_leaders():
    first, second = Rendezvous(5.0), Rendezvous(5.0)
    try:
        assert first.address.startswith("127.0.0.1:")
        connect(first.address, 5.0).set("where", "here")
        assert connect(first.address, 5.0).get("where") == b"here"
        assert not connect(second.address, 5.0).check(["where"])
    finally:
        for one in (first, second, first):
            one.close()
    host, _, port = first.address.partition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5.0)


LONELY = """
import torch.distributed as dist
from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import StageLostError
from omnistage.parallel.groups import open_process_groups
from omnistage.parallel.rendezvous import Rendezvous
from omnistage.parallel.topology import Topology

meeting = Rendezvous(5.0)
topology = Topology.of(ParallelConfig(data_parallel_size=2))
try:
    open_process_groups(topology, 0, device="cpu", rendezvous=meeting.address, timeout_s=1.0)
except StageLostError as error:
    print(error.message, dist.is_initialized())
"""


@pytest.mark.invariant("PARALLEL-INV-006")
def test_who_waits_for_a_rank_that_never_comes_hears_of_it_in_time():
    """In a process of its own, since torch counts the groups that were not made too."""
    done = subprocess.run(
        [sys.executable, "-c", LONELY], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("a rank of this stage is gone or did not answer")
    assert done.stdout.endswith("False\n")
