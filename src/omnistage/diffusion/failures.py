"""What an exception out of a pipeline call means for the request."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import (
    CheckpointError,
    InternalError,
    InvalidRequestError,
    OmniError,
    StageLostError,
    as_omni_error,
)
from omnistage.diffusion.components import schedulers_of
from omnistage.diffusion.inputs import DiffusionInputs
from omnistage.parallel.failures import is_collective_fault, lost_rank

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

INVALID_NUMBERS = (
    "the model produced invalid numbers (NaN or infinity) instead of a picture; "
    "try another dtype or a smaller guidance scale"
)
_MEMORY_MARKS = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")


def classify(error: Exception, inputs: DiffusionInputs | None, denoiser_calls: int) -> OmniError:
    """One of ours, holding no reference to the call's frames and thus to its tensors.

    What the library's own code raises as `ValueError` before it denoises is its check of the
    inputs. `extra_args` of a wrong type and latents of a wrong shape are found out by then or by
    the first pass at the latest. After a fault of the device nothing on it can be trusted, and
    weights that are found to be damaged stay so: the replica has to go (`StageLostError`).
    """
    detail = "".join(traceback.format_exception(error))
    if isinstance(error, CheckpointError):
        return StageLostError(
            "weights of this stage are damaged, so it starts again; please retry", detail=detail
        )
    if isinstance(error, OmniError):
        error.detail = error.detail or detail
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    if is_collective_fault(error):
        return lost_rank(error)
    if _is_memory(error):
        return as_omni_error(MemoryError(str(error)), detail=detail)
    if type(error).__name__ == "AcceleratorError":
        return StageLostError("a device of this stage failed; please retry", detail=detail)
    fault = _caller_fault(error, inputs, denoiser_calls) if inputs else None
    if fault is None:
        return as_omni_error(error, detail=detail)
    message, param = fault
    return InvalidRequestError(message, param=param, detail=detail)


def invalid_numbers(pipeline: DiffusionPipeline) -> OmniError:
    """Why there is no picture but NaN or infinity. Some schedules do not exist for few steps: one
    that is stretched to a terminal sigma (Qwen-Image's) divides by zero for a single step."""
    import torch

    for scheduler in schedulers_of(pipeline):
        sigmas = getattr(scheduler, "sigmas", None)
        if isinstance(sigmas, torch.Tensor) and bool(sigmas.isnan().any()):
            return no_schedule(scheduler)
    return InternalError(INVALID_NUMBERS)


def no_schedule(scheduler: Any) -> InvalidRequestError:
    """For a schedule whose sigmas are not finite."""
    return InvalidRequestError(
        f"num_inference_steps: the model's {type(scheduler).__name__} has no schedule of "
        f"{len(scheduler.timesteps)} step(s); ask for more",
        param="num_inference_steps",
    )


def _caller_fault(
    error: Exception, inputs: DiffusionInputs, denoiser_calls: int
) -> tuple[str, str | None] | None:
    """Message and parameter, when the request is to blame."""
    checking = denoiser_calls == 0 and _is_from_library(error)
    if checking and isinstance(error, ValueError):
        return f"the model refuses the request: {error}", None
    if checking and isinstance(error, TypeError | AttributeError) and inputs.params.extra_args:
        return f"a value in extra_args has the wrong type: {error}", "extra_args"
    is_shape = isinstance(error, RuntimeError) and type(error).__name__ != "OutOfMemoryError"
    if is_shape and denoiser_calls <= 1 and inputs.arrays:
        names = ", ".join(f"{name} {tuple(one.shape)}" for name, one in inputs.arrays.items())
        return f"{names}: does not fit the requested size and this model", next(iter(inputs.arrays))
    return None


def _is_memory(error: Exception) -> bool:
    """torch reports failed allocations outside its device allocator as any `RuntimeError`."""
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MEMORY_MARKS)


def _is_from_library(error: Exception) -> bool:
    """True when the line that raised belongs to diffusers."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith(
        "diffusers."
    )
