"""Watching a pipeline call from outside: cancellation, progress and phase times by module hooks.

Pipelines offer no common way in: of the 54 text-to-image pipelines of diffusers 0.40, 5 have no
step callback and 17 never read `interrupt`. All of them call their modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import RequestCancelledError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.runtime import ExecutionContext
from omnistage.diffusion.components import find_parts, schedulers_of

if TYPE_CHECKING:
    import torch
    from torch import nn


_UNCOUNTED = "uncounted"


class PipelineWatch:
    """One pipeline call on behalf of one child.

    Before every forward of an encoder, denoiser or decoder it asks the context who is cancelled
    and raises `RequestCancelledError` when the child is. Steps are counted by the schedulers' step
    index, so that several passes of one step (guidance) count once. The reported step never falls
    and ends at the total; the total grows when a pipeline denoises in more than one phase.
    """

    def __init__(
        self,
        pipeline: Any,
        context: ExecutionContext,
        identities: Sequence[RequestIdentity],
        synchronize: Callable[[], None],
    ) -> None:
        self._pipeline = pipeline
        self._parts = find_parts(pipeline)
        self._synchronize = synchronize
        self._context = context
        self._identities = tuple(identities)
        self._schedulers: list[Any] | None = None
        self._marker: Any = None
        self._broken: list[torch.Tensor] = []
        self._started_s = time.perf_counter()
        self._denoise_s: float | None = None
        self._decode_s: float | None = None
        self.denoiser_calls = 0
        self.steps_begun = 0
        self.total_steps = 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks live as long as this context, whatever ends it."""
        handles = []
        try:
            for module in self._parts.encoders.values():
                handles.append(module.register_forward_pre_hook(self._before_encoder))
            for module in self._parts.denoisers.values():
                handles.append(
                    module.register_forward_pre_hook(self._before_denoiser, with_kwargs=True)
                )
            for module in self._parts.decoders.values():
                handles.append(module.register_forward_pre_hook(self._before_decoder))
            for module in self._producers():
                handles.append(module.register_forward_hook(self._inspect))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self) -> dict[str, float]:
        """Report the last step and return seconds by phase."""
        if self.total_steps:
            self._report(self.total_steps)
        end_s = time.perf_counter()
        denoise_s = self._denoise_s if self._denoise_s is not None else end_s
        decode_s = self._decode_s if self._decode_s is not None else end_s
        return {
            "preprocess": denoise_s - self._started_s,
            "exec": decode_s - denoise_s,
            "postprocess": end_s - decode_s,
        }

    def output_is_finite(self) -> bool:
        """False when a decoder (or the denoiser, where there is none) produced NaN or infinity."""
        return not any(bool(flag) for flag in self._broken)

    def _producers(self) -> list[nn.Module]:
        return list((self._parts.decoders or self._parts.denoisers).values())

    def _check(self) -> None:
        cancelled = self._context.checkpoint()
        if all(identity.key in cancelled for identity in self._identities):
            names = ", ".join(map(str, self._identities))
            raise RequestCancelledError(f"request {names} was cancelled")

    def _report(self, step: int) -> None:
        for identity in self._identities:
            self._context.progress(identity, step, self.total_steps)

    def _before_encoder(self, module: nn.Module, args: Any) -> None:
        self._check()

    def _before_denoiser(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._denoise_s is None:
            self._denoise_s = time.perf_counter()
        self._decode_s = None
        self.denoiser_calls += 1
        marker = self._step_marker(args, kwargs)
        if self.denoiser_calls == 1 or marker != self._marker:
            self._marker = marker
            self._begin_step()
        self._check()

    def _begin_step(self) -> None:
        self.total_steps = max(self.total_steps, self._known_total(), self.steps_begun + 1)
        self._context.operation("step")
        self._report(self.steps_begun)
        self.steps_begun += 1

    def _known_total(self) -> int:
        if timesteps := getattr(self._pipeline, "num_timesteps", None):
            return int(timesteps)
        main = getattr(self._pipeline, "scheduler", None)
        timesteps = getattr(main, "timesteps", None)
        if timesteps is None:
            return 0
        return len(timesteps) - (getattr(main, "begin_index", None) or 0)

    def _step_marker(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Changes with every step. Schedulers that count nothing (DDIM, DDPM …) are told by the
        timestep that the denoiser gets; reading it waits for the device, as their own step does."""
        if self._schedulers is None:
            self._schedulers = schedulers_of(self._pipeline)
        counts = [_steps_counted(one) for one in self._schedulers]
        if counts and _UNCOUNTED not in counts:
            return tuple(counts)
        return (_timestep(args, kwargs, self.denoiser_calls),)

    def _before_decoder(self, module: nn.Module, args: Any) -> None:
        if self._decode_s is None and self._denoise_s is not None:
            self._synchronize()
            self._decode_s = time.perf_counter()
            self._context.operation("decode")
        self._check()

    def _inspect(self, module: nn.Module, args: Any, output: Any) -> None:
        import torch

        tensor = output
        while isinstance(tensor, tuple | list) and tensor:
            tensor = tensor[0]
        tensor = getattr(tensor, "sample", tensor)
        if isinstance(tensor, torch.Tensor):
            self._broken.append(~torch.isfinite(tensor).all())


def _steps_counted(scheduler: Any) -> Any:
    """`step_index`, None before the first step; PNDM calls it `counter`."""
    return getattr(scheduler, "step_index", getattr(scheduler, "counter", _UNCOUNTED))


def _timestep(args: tuple[Any, ...], kwargs: dict[str, Any], call: int) -> Any:
    """The value of the first element of a denoiser's timestep; the number of the call when it has
    none that is known."""
    value = next((kwargs[name] for name in ("timestep", "r", "t") if name in kwargs), None)
    if value is None and len(args) > 1:
        value = args[1]
    flatten = getattr(value, "reshape", None)
    if flatten is not None:
        return float(flatten(-1)[0])
    return value if isinstance(value, int | float) else call
