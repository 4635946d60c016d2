"""Outputs that are finished beside the next command, with a device played by the host."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from omnistage.contracts.errors import InternalError
from omnistage.contracts.identity import RequestIdentity
from omnistage.diffusion.late_pictures import MAX_STEPS_AHEAD, PictureOutput
from tests.diffusion.crowd import CancellingContext
from tests.platforms.fakes import FakePlatform

ONE = RequestIdentity(request_id="one")


class NotedStream:
    def __init__(self, notes: list[Any], name: str) -> None:
        self._notes = notes
        self.name = name

    def wait_stream(self, other: NotedStream) -> None:
        self._notes.append((self.name, "waits for", other.name))


class NotedEvent:
    def __init__(self, notes: list[Any], name: str) -> None:
        self._notes = notes
        self.name = name

    def record(self, stream: NotedStream | None = None) -> None:
        self._notes.append((self.name, "recorded"))

    def synchronize(self) -> None:
        self._notes.append((self.name, "waited for"))


class NotingPlatform(FakePlatform):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        self._events = 0

    def stream(self, device: str) -> NotedStream:
        return NotedStream(self.notes, "side")

    def current_stream(self, device: str) -> NotedStream:
        return NotedStream(self.notes, "main")

    @contextmanager
    def stream_scope(self, stream: NotedStream):
        self.notes.append((stream.name, "begins"))
        yield
        self.notes.append((stream.name, "ends"))

    def event(self, device: str, *, timing: bool = False) -> NotedEvent:
        self._events += 1
        return NotedEvent(self.notes, f"event {self._events}")


@pytest.fixture
def platform() -> NotingPlatform:
    return NotingPlatform()


@pytest.fixture
def output(platform, monkeypatch) -> PictureOutput:
    """Copies to memory that is not pinned, which needs no card."""
    found = PictureOutput(platform, "fake:0")

    def start_copy(images, finite):
        ready = platform.event("fake:0")
        ready.record()
        return images.clone(), finite.clone(), ready

    monkeypatch.setattr(found, "_start_copy", start_copy)
    return found


def sent(output: PictureOutput, picture: torch.Tensor, *inputs: torch.Tensor) -> Any:
    """The work of one output."""
    context = CancellingContext(set())
    with output.beside(*inputs):
        answer = output.send(context, ONE, picture, "np", {"output_type": "np"})
    assert answer.fields == {"late": True}
    ((identity, work),) = context.late
    assert identity == ONE
    return work


@pytest.mark.invariant("DIFF-RUNTIME-INV-003")
def test_inputs_live_as_long_as_the_output_that_reads_them(output):
    latents = torch.ones(3)
    alive = weakref.ref(latents)
    work = sent(output, torch.zeros(1, 3, 2, 2), latents)
    del latents
    gc.collect()
    assert alive() is not None
    del work
    gc.collect()
    assert alive() is None


@pytest.mark.invariant("DIFF-RUNTIME-INV-003")
def test_nothing_is_kept_for_work_that_failed(output):
    latents = torch.ones(3)
    alive = weakref.ref(latents)
    with pytest.raises(KeyError), output.beside(latents):
        raise KeyError("in the decoder")
    del latents
    gc.collect()
    assert alive() is None


def test_the_side_stream_waits_for_what_was_given_before(output, platform):
    work = sent(output, torch.zeros(1, 3, 2, 2))
    assert platform.notes == [
        ("side", "waits for", "main"),
        ("side", "begins"),
        ("event 1", "recorded"),
        ("side", "ends"),
    ]
    result = work()
    assert platform.notes[-1] == ("event 1", "waited for")
    assert result.tensors["images"].shape == (1, 2, 2, 3)
    assert (result.tensors["images"] == 0.5).all()


def test_invalid_numbers_come_as_an_error_of_the_late_output(output):
    work = sent(output, torch.full((1, 3, 2, 2), float("nan")))
    with pytest.raises(InternalError, match="NaN"):
        work()


def test_the_device_is_never_further_behind_than_one_step(output, platform):
    for _ in range(4):
        output.wait_for_device()
        output.mark_device()
    pending = [f"event {number}" for number in range(1, 5)]
    for name, what in platform.notes:
        if what == "waited for":
            assert name == pending.pop(0)
    assert len(pending) == MAX_STEPS_AHEAD + 1
