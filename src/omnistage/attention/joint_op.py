"""Joint attention of samples with texts of different lengths, without a mask, as one operator.

It is opaque to `torch.compile`: the lengths travel as a tensor on the CPU, so that no graph
depends on them. A captured CUDA graph does: its lengths are those of its capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from omnistage.attention.joint_math import Preparation, Projections, join_in_torch
from omnistage.attention.joint_streams import Job, run_jobs

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNEL_HEAD_SIZES = (16, 32, 64, 128, 256)


class Run(NamedTuple):
    """Adjacent samples whose texts have the same length: one attention call."""

    samples: slice
    text_tokens: int


def runs_of(lengths: Sequence[int]) -> list[Run]:
    found, start = [], 0
    for length, members in groupby(lengths):
        stop = start + len(list(members))
        found.append(Run(slice(start, stop), length))
        start = stop
    return found


def checked_lengths(lengths: torch.Tensor | None, batch: int, text_tokens: int) -> list[int]:
    """As integers; None means that every token is valid. Raises `ValueError`."""
    if lengths is None:
        return [text_tokens] * batch
    if lengths.device.type != "cpu" or lengths.dtype != torch.int64 or lengths.shape != (batch,):
        raise ValueError(
            f"text_lengths must be an int64 tensor of shape ({batch},) on the CPU, not "
            f"{lengths.dtype} {tuple(lengths.shape)} on {lengths.device}"
        )
    values: list[int] = lengths.tolist()
    if not all(0 <= value <= text_tokens for value in values):
        raise ValueError(f"text_lengths {values} must lie between 0 and {text_tokens}")
    return values


def _uses_triton(image: Projections, preparation: Preparation) -> bool:
    on_card = image.q.device.type == "cuda" and image.q.dtype in TRITON_DTYPES
    return on_card and bool(preparation.norm_weights) and bool(preparation.frequencies)


def _join(
    image: Projections, text: Projections, preparation: Preparation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not _uses_triton(image, preparation):
        return join_in_torch(image, text, preparation)
    from omnistage.attention.triton_joint import join_with_triton

    return join_with_triton(image, text, preparation)


def _attend(
    run: Run,
    image: Projections,
    text: Projections,
    preparation: Preparation,
    backend: str,
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Fill the run's rows of both outputs; rows of padding become zeros and are never read."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    image_tokens = image.q.shape[1]
    q, k, v = _join(
        image.part(run.samples, image_tokens),
        text.part(run.samples, run.text_tokens),
        preparation,
    )
    attended = dispatch_attention_fn(q, k, v, backend=backend or None)
    image_out, text_out = (
        each[run.samples].unflatten(-1, (-1, preparation.head_dim)) for each in outputs
    )
    image_out.copy_(attended[:, :image_tokens])
    text_out[:, : run.text_tokens].copy_(attended[:, image_tokens:])
    text_out[:, run.text_tokens :].zero_()


@torch.library.custom_op(
    "omnistage::joint_attention",
    mutates_args=(),
    schema="(Tensor[] image, Tensor[] text, Tensor[] norm_weights, Tensor[] frequencies, "
    "Tensor? text_lengths, int head_dim, float eps, str backend) -> (Tensor, Tensor)",
)
def joint_attention(
    image: Sequence[torch.Tensor],
    text: Sequence[torch.Tensor],
    norm_weights: Sequence[torch.Tensor],
    frequencies: Sequence[torch.Tensor],
    text_lengths: torch.Tensor | None,
    head_dim: int,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over image and valid text tokens of each sample.

    `image` and `text`: q, k, v, each (batch, tokens, heads * head_dim). `norm_weights` and
    `frequencies`: see `Preparation`. `text_lengths`: int64 (batch,) on the CPU, or None for all.
    `backend`: a name of `diffusers`' attention backends, or "" for its default.
    Returns (image, text) in the shapes of the inputs, contiguous; text rows of padding are zeros.
    """
    streams = Projections(*map(_with_dense_rows, image)), Projections(*map(_with_dense_rows, text))
    preparation = Preparation(head_dim, eps, norm_weights, frequencies)
    outputs = image[0].new_empty(image[0].shape), text[0].new_empty(text[0].shape)
    batch, image_tokens = image[0].shape[:2]
    jobs = [
        Job(
            (run.samples.stop - run.samples.start) * (image_tokens + run.text_tokens) ** 2,
            partial(_attend, run, *streams, preparation, backend, outputs),
        )
        for run in runs_of(checked_lengths(text_lengths, batch, text[0].shape[1]))
    ]
    run_jobs(jobs, image[0].device)
    return outputs


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """A projection may be a part of a wider one: its rows are apart then."""
    return x if x.stride(-1) == 1 else x.contiguous()


@joint_attention.register_fake
def _shapes(
    image: Sequence[torch.Tensor],
    text: Sequence[torch.Tensor],
    norm_weights: Sequence[torch.Tensor],
    frequencies: Sequence[torch.Tensor],
    text_lengths: torch.Tensor | None,
    head_dim: int,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    image_out, text_out = (x.new_empty(x.shape) for x in (image[0], text[0]))
    return image_out, text_out
