"""Deaths, leaks and impostors: whatever happens, no shared memory outlives its users."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from omnistage.contracts.errors import ProtocolError, StageLostError, UnavailableError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import PayloadRef, SharedSegment, StageData, TensorRef
from omnistage.transport.segments import shared_memory_usable
from omnistage.transport.shared_memory import SharedMemoryConnector

pytestmark = pytest.mark.skipif(not shared_memory_usable(), reason="needs memfd and /proc")

MIB = 2**20


class Peer:
    """A process running `peer.py`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, verb: str, argument: str = "") -> str:
        assert self.process.stdin
        self.process.stdin.write(f"{verb} {argument}\n")
        self.process.stdin.flush()
        return self._line()

    def send(self, size_mib: int) -> PayloadRef:
        return msgspec.msgpack.decode(
            bytes.fromhex(self.ask("send", str(size_mib))), type=PayloadRef
        )

    def receive(self, ref: PayloadRef) -> int:
        return int(self.ask("receive", msgspec.msgpack.encode(ref).hex()))

    def kill(self, *, reap: bool = True) -> None:
        self.process.send_signal(signal.SIGKILL)
        if reap:
            self.process.wait(timeout=30)
        else:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        assert line, "the peer died"
        return line


@contextmanager
def peer() -> Iterator[Peer]:
    started = Peer()
    try:
        yield started
    finally:
        started.close()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def segment_of(ref: PayloadRef) -> SharedSegment:
    place = ref.tensors["x"].place
    assert isinstance(place, SharedSegment)
    return place


def holders(token: str) -> set[int]:
    """Processes that hold the segment by a descriptor or a mapping. None: the kernel freed it."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if token in _links(pid) or token in _maps(pid):
            found.add(int(pid))
    return found


def _links(pid: str) -> str:
    links = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        pass
    return "\n".join(links)


def _maps(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/maps") as file:
            return file.read()
    except OSError:
        return ""


def ones(size_bytes: int) -> StageData:
    return StageData(modality=Modality.LATENT, tensors={"x": np.ones(size_bytes, np.uint8)})


@pytest.mark.invariant("CONNECTOR-INV-003")
def test_producer_killed_after_the_data_was_received() -> None:
    connector = SharedMemoryConnector(1024)
    before = descriptors()
    with peer() as producer:
        ref = producer.send(4)
        token = segment_of(ref).token
        arrived = connector.receive(ref, [])
        producer.kill()
        assert holders(token) == {os.getpid()}
        assert int(arrived.tensors["x"].numpy().sum(dtype=np.int64)) == 4 * MIB
    del arrived
    assert holders(token) == set()
    assert descriptors() == before


@pytest.mark.invariant("CONNECTOR-INV-003")
@pytest.mark.parametrize("reap", [True, False], ids=["gone", "zombie"])
def test_producer_killed_before_the_data_was_received(reap: bool) -> None:
    connector = SharedMemoryConnector(1024)
    before = descriptors()
    with peer() as producer:
        ref = producer.send(4)
        producer.kill(reap=reap)
        with pytest.raises(StageLostError, match="made this data died") as caught:
            connector.receive(ref, [])
        assert f"process {producer.pid}" in str(caught.value.detail)
        assert str(producer.pid) not in caught.value.message
        assert holders(segment_of(ref).token) == set()
    assert descriptors() == before


@pytest.mark.invariant("CONNECTOR-INV-003")
def test_consumer_killed_while_it_holds_the_data() -> None:
    connector = SharedMemoryConnector(1024)
    with peer() as consumer:
        before = descriptors()
        ref, _ = connector.send(ones(4 * MIB))
        assert ref.handle
        assert consumer.receive(ref) == 4 * MIB
        assert holders(segment_of(ref).token) == {os.getpid(), consumer.pid}
        consumer.kill()
        assert holders(segment_of(ref).token) == {os.getpid()}
        assert connector.outstanding_bytes() == 4 * MIB
        connector.release(ref.handle)
        assert holders(segment_of(ref).token) == set()
        assert descriptors() == before


@pytest.mark.invariant("CONNECTOR-INV-003")
def test_both_sides_killed_at_once() -> None:
    with peer() as producer, peer() as consumer:
        ref = producer.send(4)
        assert consumer.receive(ref) == 4 * MIB
        assert holders(segment_of(ref).token) == {producer.pid, consumer.pid}
        producer.kill()
        consumer.kill()
        assert holders(segment_of(ref).token) == set()


@pytest.mark.invariant("CONNECTOR-INV-003")
def test_release_while_the_consumer_still_reads() -> None:
    with peer() as producer, peer() as consumer:
        ref = producer.send(4)
        assert ref.handle
        assert consumer.receive(ref) == 4 * MIB
        assert producer.ask("release", ref.handle) == "done"
        assert holders(segment_of(ref).token) == {consumer.pid}
        assert consumer.ask("drop") == "done"
        assert holders(segment_of(ref).token) == set()


def test_a_child_process_inherits_no_segment() -> None:
    connector = SharedMemoryConnector(1024)
    ref, _ = connector.send(ones(MIB))
    with peer() as child:
        assert child.pid not in holders(segment_of(ref).token)
    connector.close()


def test_the_resource_tracker_is_not_started() -> None:
    script = (
        "import numpy as np, os\n"
        "from multiprocessing import resource_tracker\n"
        "from tests.transport.test_shared_memory import ones, SharedMemoryConnector\n"
        "connector = SharedMemoryConnector(1)\n"
        "ref, frames = connector.send(ones(5000))\n"
        "connector.receive(ref, frames)\n"
        "assert resource_tracker._resource_tracker._fd is None\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def moved(ref: PayloadRef, **changes: int | str) -> PayloadRef:
    """The same reference with another pid, fd, token or offset."""
    tensor = ref.tensors["x"]
    place = msgspec.structs.replace(tensor.place, **changes)
    return msgspec.structs.replace(ref, tensors={"x": TensorRef(tensor.dtype, tensor.shape, place)})


@pytest.mark.invariant("CONNECTOR-INV-004")
def test_a_wrong_token_descriptor_or_range_is_refused() -> None:
    connector = SharedMemoryConnector(1)
    before = descriptors()
    ref, _ = connector.send(ones(100))
    other, _ = connector.send(ones(100))
    with open(os.devnull) as unrelated:
        wrong = {
            "token differs": [
                moved(ref, token="0" * 32),
                moved(ref, fd=segment_of(other).fd),
                moved(ref, fd=unrelated.fileno()),
            ],
            "took its output back": [moved(ref, fd=99_999), moved(ref, fd=-1)],
            "100 bytes": [moved(ref, offset=1), moved(ref, offset=-1), moved(ref, offset=2**62)],
        }
        for named, refs in wrong.items():
            for bad in refs:
                with pytest.raises((ProtocolError, StageLostError), match=named):
                    connector.receive(bad, [])
    connector.close()
    assert descriptors() == before


@pytest.mark.invariant("CONNECTOR-INV-004")
def test_a_released_payload_is_refused_also_when_its_descriptor_is_used_again() -> None:
    connector = SharedMemoryConnector(1)
    stale, _ = connector.send(ones(100))
    assert stale.handle
    connector.release(stale.handle)
    with pytest.raises(StageLostError, match="took its output back"):
        connector.receive(stale, [])
    fresh, _ = connector.send(ones(100))
    assert segment_of(fresh).fd == segment_of(stale).fd
    with pytest.raises(ProtocolError, match="token differs"):
        connector.receive(stale, [])
    connector.close()


def test_a_descriptor_that_is_a_pipe_does_not_block() -> None:
    reading, writing = os.pipe()
    connector = SharedMemoryConnector(1)
    ref, _ = connector.send(ones(100))
    with pytest.raises(ProtocolError, match="token differs"):
        connector.receive(moved(ref, fd=reading), [])
    os.close(reading)
    os.close(writing)
    connector.close()


@pytest.mark.invariant("CONNECTOR-INV-004")
def test_a_segment_that_its_producer_could_still_change_is_refused() -> None:
    token = "f" * 32
    fd = os.memfd_create(f"omnistage-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100)
    place = SharedSegment(os.getpid(), fd, token, 0)
    ref = PayloadRef(modality=Modality.LATENT, tensors={"x": TensorRef("uint8", (100,), place)})
    with pytest.raises(ProtocolError, match="not sealed"):
        SharedMemoryConnector(1).receive(ref, [])
    os.close(fd)


@pytest.mark.invariant("CONNECTOR-INV-004")
def test_nobody_can_change_a_sent_segment() -> None:
    connector = SharedMemoryConnector(1)
    ref, _ = connector.send(ones(100))
    fd = segment_of(ref).fd
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 10)):
        with pytest.raises(PermissionError):
            change()
    connector.close()


def test_running_out_of_descriptors_is_a_clear_error_and_heals() -> None:
    connector = SharedMemoryConnector(1)
    ref, _ = connector.send(ones(100))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(spare), hard))
        for call in (lambda: connector.send(ones(100)), lambda: connector.receive(ref, [])):
            with pytest.raises(UnavailableError, match="ulimit -n"):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)
    assert highest < soft
    assert connector.receive(ref, []).tensors["x"].nbytes == 100
    assert connector.outstanding() == 1
    connector.close()


@pytest.mark.invariant("CONNECTOR-INV-003")
def test_threads_send_receive_and_release_without_a_leak() -> None:
    connector = SharedMemoryConnector(1)
    before = descriptors()
    failures: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for _ in range(50):
                data = StageData(
                    modality=Modality.LATENT, tensors={"x": np.full(9000, value, np.uint8)}
                )
                ref, frames = connector.send(data)
                arrived = connector.receive(ref, frames)
                connector.release(str(ref.handle))
                assert (arrived.tensors["x"].numpy() == value).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    assert connector.outstanding() == 0
    assert descriptors() == before


def test_a_thousand_payloads_leave_no_memory_behind() -> None:
    connector = SharedMemoryConnector(1)
    data = ones(MIB)
    before = descriptors()
    deadline = time.monotonic() + 120
    for _ in range(1000):
        ref, frames = connector.send(data)
        connector.receive(ref, frames)
        connector.release(str(ref.handle))
        assert time.monotonic() < deadline
    assert descriptors() == before
    assert "memfd:omnistage" not in _maps("self") + _links("self")
