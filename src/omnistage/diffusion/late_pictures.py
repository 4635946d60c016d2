"""From decoded pictures on the device to the payload that leaves the stage.

On a GPU the copy to the host runs beside the next command: the executing thread only starts it, the
replica's output thread waits for it and builds the payload.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import InternalError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import ExecutionContext
from omnistage.diffusion.failures import INVALID_NUMBERS
from omnistage.diffusion.outputs import size_fields

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import Platform

MAX_STEPS_AHEAD = 1


class PictureOutput:
    """`asynchronous`: decoding and copies run on a stream of their own, beside the next steps.

    What that stream reads is kept until it is through, by whoever waits for the output, instead
    of by `record_stream`: torch gives recorded memory back late, and never while it believes that
    a graph is being captured. Of outputs that were all withdrawn nobody sees what was read.
    """

    def __init__(self, platform: Platform, device: str) -> None:
        self._platform = platform
        self._device = device
        self.asynchronous = device.partition(":")[0] != "cpu"
        self._side = platform.stream(device) if self.asynchronous else None
        self._steps: deque[Any] = deque()
        self._inputs: tuple[torch.Tensor, ...] = ()

    def wait_for_device(self) -> None:
        """Wait until at most one step is under way on the device: one more keeps it busy, many
        would make progress and cancellation untrue."""
        while len(self._steps) > MAX_STEPS_AHEAD:
            self._steps.popleft().synchronize()

    def mark_device(self) -> None:
        """The work of one step has been given to the device."""
        if self.asynchronous:
            event = self._platform.event(self._device)
            event.record()
            self._steps.append(event)

    @contextmanager
    def beside(self, *inputs: torch.Tensor) -> Iterator[None]:
        """Work on `inputs` started inside runs beside what is started after it."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(self._platform.current_stream(self._device))
        self._inputs = inputs
        try:
            with self._platform.stream_scope(self._side):
                yield
        finally:
            self._inputs = ()

    def send(
        self,
        context: ExecutionContext,
        identity: RequestIdentity,
        picture: torch.Tensor,
        output_type: str,
        fields: dict[str, Any],
    ) -> StageData:
        """The finished payload, or one that says "late" and comes by `finish_later`. On a GPU call
        it inside `beside`.

        `picture`: (n, 3, height, width) in [-1, 1], or latents for "latent". Raises `InternalError`
        (or brings it) for numbers that are not finite.
        """
        finite = picture.isfinite().all()
        images = as_output(picture, output_type)
        fields = {**fields, **size_fields(images, output_type)}
        started = time.perf_counter()

        def finish(images: torch.Tensor, finite: torch.Tensor) -> StageData:
            fields["peak_memory_mb"] = self._platform.peak_memory_mb(self._device)
            if "timings_s" in fields:
                fields["timings_s"]["postprocess"] += time.perf_counter() - started
            return finished(images, finite, fields)

        if not self.asynchronous:
            return finish(images, finite)
        on_host, flag, ready = self._start_copy(images, finite)

        def work(reads: tuple[torch.Tensor, ...] = self._inputs) -> StageData:
            ready.synchronize()
            del reads
            return finish(on_host, flag)

        context.finish_later(identity, work)
        return StageData(modality=Modality.IMAGE, fields={"late": True})

    def close(self) -> None:
        if self.asynchronous:
            self._platform.synchronize(self._device)
        self._steps.clear()

    def _start_copy(
        self, images: torch.Tensor, finite: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Pinned host tensors, and the event after which they hold the device's."""
        import torch

        on_host = torch.empty(images.shape, dtype=images.dtype, pin_memory=True)
        flag = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
        on_host.copy_(images, non_blocking=True)
        flag.copy_(finite, non_blocking=True)
        ready = self._platform.event(self._device)
        ready.record(self._platform.current_stream(self._device))
        return on_host, flag, ready


def as_output(picture: torch.Tensor, output_type: str) -> torch.Tensor:
    """The steps of diffusers' `VaeImageProcessor.postprocess`, on the device: "pil" uint8 (n,
    height, width, 3), "np" float32 likewise, "pt" (n, 3, height, width), "latent" unchanged."""
    import torch

    if output_type == "latent":
        return picture
    unit = (picture * 0.5 + 0.5).clamp(0, 1)
    if output_type == "pt":
        return unit
    unit = unit.permute(0, 2, 3, 1).float()
    if output_type == "np":
        return unit.contiguous()
    return (unit * 255).round().to(torch.uint8).contiguous()


def finished(images: torch.Tensor, finite: torch.Tensor, fields: dict[str, Any]) -> StageData:
    if not bool(finite):
        raise InternalError(INVALID_NUMBERS)
    tensor: Any = images if fields["output_type"] in ("pt", "latent") else images.numpy()
    return StageData(modality=Modality.IMAGE, tensors={"images": tensor}, fields=fields)
