"""Timesteps of one request for flow matching, as the pipelines of diffusers compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omnistage.diffusion.family import StepRequestState

if TYPE_CHECKING:
    import torch


def set_schedule(
    state: StepRequestState, scheduler: Any, device: torch.device, *, sigmas: Any, **shift: float
) -> None:
    """Give the request its scheduler and its timesteps: `num_inference_steps` of them, or those of
    `sigmas`. `shift`: "mu", where the pipeline hands one over.

    Raises `ValueError` for sigmas that the scheduler does not take.
    """
    from diffusers.pipelines.flux.pipeline_flux import retrieve_timesteps

    state.scheduler = scheduler
    state.timesteps, _ = retrieve_timesteps(
        scheduler, state.arguments["num_inference_steps"], device, sigmas=sigmas, **shift
    )


def even_sigmas(state: StepRequestState) -> Any:
    """The request's own sigmas, or float64 (steps,) from 1 to 1 / steps."""
    import numpy as np

    sigmas, count = state.arguments["sigmas"], state.arguments["num_inference_steps"]
    return np.linspace(1.0, 1 / count, count) if sigmas is None else sigmas


def shift_of(scheduler: Any, num_tokens: int, max_shift: float = 1.15) -> float:
    """The schedule's shift "mu" for pictures of `num_tokens`; `max_shift` where the scheduler's
    configuration has none."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = scheduler.config
    mu: float = calculate_shift(
        num_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )
    return mu
