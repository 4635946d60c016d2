"""Copies to the host that start with a step and are waited for behind it; payloads made of them.

A step takes a snapshot of what later stages need and starts its copy; the output thread waits for
the copy and builds the payload. Nothing here is read from memory that a later step writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from omnistage.contracts.payloads import StageData
from omnistage.platforms.registry import platform_of

if TYPE_CHECKING:
    import torch

    from omnistage.ar.assembly import Assembly
    from omnistage.ar.running import Running
    from omnistage.ar.step_runner import LiveRow, StepResult
    from omnistage.contracts.modalities import Modality
    from omnistage.contracts.runtime import ExecutionContext

Tensors = Mapping[str, "torch.Tensor"]


class HostCopy:
    """Tensors on their way to the host. `wait` may be called from any thread, more than once."""

    def __init__(self, tensors: Tensors, event: Any) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> Tensors:
        """The tensors, on the host and complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class HostCopier:
    """Starts copies, for the thread that runs the steps. On a CPU a copy is the tensor itself."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._platform = platform_of(device)
        self._on_host = device == "cpu"
        self._stream = None if self._on_host else self._platform.stream(device)

    def behind(self, snapshots: Tensors) -> HostCopy:
        """On a stream of its own, so that the next step does not wait. `snapshots` belong to the
        copy: no later step writes them."""
        if self._on_host:
            return HostCopy(snapshots, None)
        self._stream.wait_stream(self._platform.current_stream(self._device))
        with self._platform.stream_scope(self._stream):
            copied = self._started(snapshots)
            for tensor in filter(is_on_device, snapshots.values()):
                tensor.record_stream(self._stream)
        return copied

    def at_once(self, tensors: Tensors) -> HostCopy:
        """In order with the steps: the next one may write `tensors` again."""
        if self._on_host:
            return HostCopy({name: tensor.clone() for name, tensor in tensors.items()}, None)
        return self._started(tensors)

    def _started(self, tensors: Tensors) -> HostCopy:
        import torch

        copies = {}
        for name, tensor in tensors.items():
            if not is_on_device(tensor):
                copies[name] = tensor
                continue
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name] = host.copy_(tensor, non_blocking=True)
        event = self._platform.event(self._device)
        event.record()
        return HostCopy(copies, event)


class RowPayload:
    """Builds one row's payload: its prompt's tensors, then its place in those of the step. Tensors
    of the same name are joined along dimension 0."""

    def __init__(
        self, modality: Modality, prompt: HostCopy | None, step: HostCopy | None, place: int
    ) -> None:
        self._modality = modality
        self._prompt, self._step, self._place = prompt, step, place

    def __call__(self) -> StageData:
        parts: dict[str, list[torch.Tensor]] = {}
        if self._prompt is not None:
            for name, tensor in self._prompt.wait().items():
                parts.setdefault(name, []).append(tensor)
        if self._step is not None:
            for name, tensor in self._step.wait().items():
                own = tensor[self._place : self._place + 1].clone()
                parts.setdefault(name, []).append(own)
        return StageData(
            modality=self._modality,
            tensors={name: _joined(found) for name, found in parts.items()},
        )


def send_payloads(
    assembly: Assembly,
    modality: Modality,
    rows: Sequence[LiveRow],
    result: StepResult | None,
    context: ExecutionContext,
) -> None:
    """Hand over, for each row that wants it, the building of what later stages need of it: of a
    prompt that is complete now, `prompt_payload`; of a generated token's position, `step_payload`.
    """
    step: HostCopy | None = None
    places = {id(row): index for index, (row, _) in enumerate(r for r in rows if r[0].samples)}
    for row, live in rows:
        if not row.wants_payload:
            continue
        end = row.start + row.count
        prompt: HostCopy | None = None
        follows_token = end > live.prompt_tokens
        if follows_token and step is None and result is not None and result.payload:
            step = assembly.copier.behind(_snapshot(result.payload, len(places)))
        elif end == live.prompt_tokens and not live.prompt_sent:
            live.prompt_sent = True
            try:
                prompt = _prompt_copy(assembly, live)
            except Exception as error:  # This request's alone: the step goes on.
                context.finish_later(row.identity, partial(_raise, error))
                continue
        own_step = step if follows_token else None
        work = RowPayload(modality, prompt, own_step, places.get(id(row), 0))
        context.finish_later(row.identity, work)


def _raise(error: Exception) -> NoReturn:
    raise error


def _prompt_copy(assembly: Assembly, live: Running) -> HostCopy:
    cache = assembly.cache
    states: dict[str, torch.Tensor] = {}
    if cache.states:
        size = cache.plan.block_size
        slots = assembly.runner.step_input.host_tensor([live.slots(0, live.prompt_tokens, size)])
        states = cache.read_states(slots[0].to(assembly.device, non_blocking=True))
    payload = assembly.model.prompt_payload(live.sequence, states)
    return assembly.copier.behind(_snapshot(payload))


def _snapshot(tensors: Tensors, rows: int | None = None) -> dict[str, torch.Tensor]:
    """Copies that no later step writes."""
    return {
        name: tensor[:rows].clone() if hasattr(tensor, "clone") else tensor
        for name, tensor in tensors.items()
    }


def is_on_device(tensor: Any) -> bool:
    return bool(getattr(tensor, "is_cuda", False))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
