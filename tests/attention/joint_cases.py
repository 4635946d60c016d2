"""Projections of two streams to join, and how near two results of it must be.

Run as a program it compares the Triton kernel with torch in Triton's interpreter, in a process
of its own since the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from omnistage.attention.joint_math import Preparation, Projections, join_in_torch
from omnistage.attention.joint_op import KERNEL_HEAD_SIZES

Joint = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """`padding`: tokens of text, all NaN, between a sample's valid ones and the next sample."""

    dtype: torch.dtype
    batch: int
    image_tokens: int
    text_tokens: int
    padding: int
    heads: int
    head_dim: int


SMALL_CASES = (
    Case(torch.float32, 2, 37, 5, 3, 4, 32),
    Case(torch.bfloat16, 2, 37, 5, 3, 4, 32),
    Case(torch.float16, 1, 16, 16, 0, 3, 16),
    Case(torch.bfloat16, 1, 19, 0, 2, 2, 128),
)


def preparation_of(case: Case, device: str, random: torch.Generator) -> Preparation:
    weights = [torch.randn(case.head_dim, generator=random) + 1 for _ in range(4)]
    turns = []
    for tokens in (case.image_tokens, case.text_tokens + case.padding):
        angles = torch.rand(tokens, case.head_dim // 2, generator=random) * 6.3
        turns.append(torch.stack((angles.cos(), angles.sin()), dim=-1).to(device))
    weights = [weight.to(device, case.dtype) for weight in weights]
    return Preparation(case.head_dim, 1e-6, weights, turns)


def projections_of(case: Case, device: str) -> tuple[Projections, Projections, Preparation]:
    """Of the image and of the whole text with its padding."""
    random = torch.Generator().manual_seed(2)

    def stream(tokens: int) -> Projections:
        shape = (case.batch, tokens, case.heads * case.head_dim)
        parts = [torch.randn(shape, generator=random) * 3 for _ in "qkv"]
        return Projections(*(part.to(device, case.dtype) for part in parts))

    image, text = stream(case.image_tokens), stream(case.text_tokens + case.padding)
    for each in text:
        each[:, case.text_tokens :] = torch.nan
    return image, text, preparation_of(case, device, random)


def parts_of_one(stream: Projections) -> Projections:
    """The same numbers as parts of one wide projection."""
    return Projections(*torch.cat(stream, dim=-1).chunk(3, dim=-1))


def valid(case: Case, text: Projections) -> Projections:
    return text.part(slice(0, case.batch), case.text_tokens)


def assert_same_rounding(found: Joint, expected: Joint, *, equal: float) -> None:
    """At least that share of elements equal, the others but for a rounding of the last bits."""
    for of_kernel, of_torch in zip(found, expected, strict=True):
        assert of_torch.float().abs().mean() > 0.5
        assert of_kernel.shape == of_torch.shape
        last_bit = torch.finfo(of_torch.dtype).eps
        torch.testing.assert_close(of_kernel, of_torch, rtol=4 * last_bit, atol=64 * last_bit)
        assert (of_kernel == of_torch).float().mean() >= equal


def equal_share(case: Case, device: str) -> float:
    """Of float32 the last bit depends on the order of a sum; Triton's interpreter truncates to
    bfloat16 where a card rounds."""
    if case.dtype == torch.float32:
        return 0.0
    return 0.0 if device == "cpu" and case.dtype == torch.bfloat16 else 0.99


def compare(case: Case, device: str) -> None:
    from omnistage.attention.triton_joint import join_with_triton

    image, text, preparation = projections_of(case, device)
    text = valid(case, text)
    found = join_with_triton(image, text, preparation)
    wide = (parts_of_one(image), valid(case, parts_of_one(text)))
    for of_parts, of_own in zip(join_with_triton(*wide, preparation), found, strict=True):
        assert torch.equal(of_parts, of_own), "rows that lie apart are read wrongly"
    equal = equal_share(case, device)
    assert_same_rounding(found, join_in_torch(image, text, preparation), equal=equal)
    swapped = preparation._replace(norm_weights=preparation.norm_weights[::-1])
    try:
        assert_same_rounding(found, join_in_torch(image, text, swapped), equal=equal)
    except AssertionError:
        return
    raise AssertionError("swapped norm weights made no difference")


def check_table() -> None:
    from omnistage.attention.triton_joint import TILES

    assert tuple(TILES) == KERNEL_HEAD_SIZES


if __name__ == "__main__":
    check_table()
    torch.set_num_threads(1)
    for small in SMALL_CASES:
        compare(small, "cpu")
    sys.stdout.write(f"{len(SMALL_CASES)} cases agree\n")
