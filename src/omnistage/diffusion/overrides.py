"""Settings that one request changes on the shared pipeline, undone when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.diffusion.components import autoencoder

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@contextmanager
def request_settings(
    pipeline: DiffusionPipeline, params: OmniDiffusionSamplingParams
) -> Iterator[None]:
    """The request's scheduler and autoencoder settings, in force for one call."""
    with ExitStack() as stack:
        if params.scheduler is not None or params.flow_shift is not None:
            stack.enter_context(_scheduler(pipeline, request_scheduler(pipeline, params)))
        for feature, wanted in (("tiling", params.vae_tiling), ("slicing", params.vae_slicing)):
            if wanted is not None:
                stack.enter_context(_autoencoder_feature(pipeline, feature, wanted))
        yield


def request_scheduler(pipeline: DiffusionPipeline, params: OmniDiffusionSamplingParams) -> Any:
    """A new scheduler from the config of the pipeline's own. Raises `InvalidRequestError`."""
    current = getattr(pipeline, "scheduler", None)
    if current is None:
        raise InvalidRequestError(
            f"{type(pipeline).__name__} has no scheduler to choose", param="scheduler"
        )
    wanted = params.scheduler or type(current).__name__
    classes = {type(current).__name__: type(current)}
    if wanted not in classes:
        classes |= {one.__name__: one for one in current.compatibles}
    if wanted not in classes:
        raise InvalidRequestError(
            f"scheduler {wanted!r} does not fit this model; allowed: {', '.join(sorted(classes))}",
            param="scheduler",
        )
    changes = {}
    if params.flow_shift is not None:
        changes = {_shift_name(current.config): params.flow_shift}
    return classes[wanted].from_config(current.config, **changes)


def _shift_name(config: Any) -> str:
    if config.get("use_dynamic_shifting"):
        raise UnsupportedCombinationError(
            "flow_shift has no effect: this model's scheduler shifts by the picture's size",
            param="flow_shift",
        )
    for name in ("flow_shift", "shift"):
        if name in config:
            return name
    raise InvalidRequestError("this model's scheduler has no shift", param="flow_shift")


@contextmanager
def _scheduler(pipeline: DiffusionPipeline, scheduler: Any) -> Iterator[None]:
    original = pipeline.scheduler
    pipeline.scheduler = scheduler
    try:
        yield
    finally:
        pipeline.scheduler = original


@contextmanager
def _autoencoder_feature(pipeline: DiffusionPipeline, feature: str, wanted: bool) -> Iterator[None]:
    before = set_autoencoder_feature(pipeline, feature, wanted)
    try:
        yield
    finally:
        set_autoencoder_feature(pipeline, feature, before)


def set_autoencoder_feature(pipeline: DiffusionPipeline, feature: str, wanted: bool) -> bool:
    """Turn "tiling" or "slicing" on or off and return what it was before.

    Raises `InvalidRequestError` when the autoencoder cannot do it.
    """
    model = autoencoder(pipeline)
    before = getattr(model, f"use_{feature}", None)
    if before is None:
        if not wanted:
            return False
        raise InvalidRequestError(
            f"{type(pipeline).__name__} has no autoencoder that can do {feature}",
            param=f"vae_{feature}",
        )
    if wanted != before:
        getattr(model, f"{'enable' if wanted else 'disable'}_{feature}")()
    return bool(before)
