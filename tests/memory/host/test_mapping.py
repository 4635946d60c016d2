"""Files are mapped read-only and shared; nothing is unmapped under a tensor."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings

import pytest
import torch

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.host.mapping import PAGE_BYTES, AnonymousMemory, MappedFile


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 100)
    return path


def maps_of(path):
    """The permissions of this process's mappings of a file."""
    with open("/proc/self/maps") as lines:
        return [line.split()[1] for line in lines if line.rstrip().endswith(str(path))]


@pytest.mark.invariant("HOST-INV-002")
def test_a_file_is_mapped_read_only_and_shared_without_a_copy_or_a_warning(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory = MappedFile(file, expected_bytes=25_600)
        whole = memory.bytes
    assert maps_of(file) == ["r--s"]
    assert whole.dtype == torch.uint8
    assert whole.data_ptr() == memory.address
    assert memory.address % PAGE_BYTES == 0
    assert whole.numpy().tobytes() == file.read_bytes()
    with file.open("r+b") as stream:
        stream.write(b"\xaa")
    assert whole[0] == 0xAA


@pytest.mark.invariant("HOST-INV-002")
def test_a_write_ends_the_process_instead_of_changing_the_file(file):
    script = (
        "import sys, pathlib\n"
        "from omnistage.memory.host.mapping import MappedFile\n"
        "MappedFile(pathlib.Path(sys.argv[1])).bytes[0] = 1\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file)], timeout=120, check=False)
    assert done.returncode == -11
    assert file.read_bytes()[0] == 0


@pytest.mark.invariant("HOST-INV-003")
def test_pages_stay_until_the_last_tensor_is_gone(file):
    memory = MappedFile(file)
    part = memory.bytes[256:512].view(torch.int32)
    memory.close()
    memory.close()
    assert memory.is_closed
    assert maps_of(file) == ["r--s"]
    assert part.view(torch.uint8).tolist() == list(range(256))
    del part
    gc.collect()
    assert maps_of(file) == []


@pytest.mark.invariant("HOST-INV-003")
def test_a_memory_that_nobody_looked_at_is_unmapped_at_once(file):
    memory = MappedFile(file)
    memory.close()
    assert maps_of(file) == []


@pytest.mark.invariant("HOST-INV-003")
def test_no_descriptor_stays_open(file):
    before = len(os.listdir("/proc/self/fd"))
    memory = MappedFile(file)
    memory.bytes.sum()
    memory.close()
    with pytest.raises(CheckpointError):
        MappedFile(file, expected_bytes=1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_of_another_size_are_refused_before_they_are_mapped(file, tmp_path):
    with pytest.raises(CheckpointError, match=r"has 25600 bytes, expected 25601.*download"):
        MappedFile(file, expected_bytes=25_601)
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"gone cannot be read: No such file"):
        MappedFile(tmp_path / "gone")


def test_reading_ahead_takes_any_part(file):
    memory = MappedFile(file)
    for offset_bytes, nbytes in ((0, 1), (5000, 10_000), (25_599, 1), (25_600, 0)):
        memory.will_need(offset_bytes, nbytes)


def test_private_memory_is_zero_writable_and_not_shared():
    memory = AnonymousMemory(3 * PAGE_BYTES + 1)
    assert memory.bytes.shape == (3 * PAGE_BYTES + 1,)
    assert not memory.bytes.any()
    memory.bytes.fill_(7)
    assert memory.bytes[-1] == 7
    assert not memory.read_only


CHILD = """
import sys, pathlib, torch
from omnistage.memory.host.mapping import MappedFile
memory = MappedFile(pathlib.Path(sys.argv[1]))
memory.bytes.to(torch.int32).sum()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.invariant("HOST-INV-002")
def test_processes_share_the_pages_of_a_file(tmp_path):
    path = tmp_path / "weights"
    size_bytes = 8 * 2**20
    path.write_bytes(os.urandom(size_bytes))
    memory = MappedFile(path)
    memory.bytes.to(torch.int32).sum()
    alone = proportional_bytes(path)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        shared = proportional_bytes(path)
    finally:
        child.communicate("\n", timeout=60)
    assert alone == size_bytes
    assert shared == pytest.approx(size_bytes / 2, rel=0.01)


def proportional_bytes(path):
    """This process's share of the pages of a file."""
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                inside = line.rstrip().endswith(str(path))
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total
