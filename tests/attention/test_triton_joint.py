"""The kernel against torch operations: in Triton's interpreter here, compiled on a card."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from omnistage.attention.joint_math import Projections, join_in_torch
from omnistage.attention.joint_op import joint_attention
from tests.attention.joint_cases import SMALL_CASES, Case, compare, projections_of
from tests.interpreted import cases_agree

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CARD_CASES = (
    *SMALL_CASES,
    Case(torch.bfloat16, 2, 4096, 256, 0, 24, 128),
    Case(torch.bfloat16, 3, 1000, 77, 51, 24, 128),
    Case(torch.float32, 2, 513, 10, 6, 5, 64),
    Case(torch.float16, 1, 65, 1, 0, 2, 256),
)
QWEN = Case(torch.bfloat16, 2, 1024, 256, 0, 24, 128)
LENGTHS = (256, 10)


@needs_triton
@pytest.mark.slow
@pytest.mark.invariant("ATTN-INV-008")
def test_the_kernel_does_what_torch_does() -> None:
    assert cases_agree("tests.attention.joint_cases") == f"{len(SMALL_CASES)} cases agree\n"


@pytest.mark.gpu
@needs_a_card
@pytest.mark.invariant("ATTN-INV-008")
@pytest.mark.parametrize("case", CARD_CASES, ids=str)
def test_the_compiled_kernel_does_what_torch_does(case: Case) -> None:
    compare(case, "cuda")


class OnCard:
    """Both branches of one step at the shape of Qwen-Image, 512 x 512."""

    def __init__(self) -> None:
        self.case = QWEN
        self.image, self.text, self.preparation = projections_of(QWEN, "cuda")

    def copy(self) -> OnCard:
        """The same values in memory of its own."""
        other = copy.copy(self)
        other.image, other.text = (
            Projections(*(each.clone() for each in s)) for s in (self.image, self.text)
        )
        return other

    def attend(self, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        weights, turns = self.preparation.norm_weights, self.preparation.frequencies
        return joint_attention(
            [*self.image],
            [*self.text],
            [*weights],
            [*turns],
            torch.tensor(lengths),
            self.case.head_dim,
            self.preparation.eps,
            "",
        )

    def alone(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """In torch operations, in float32, on the current stream."""
        one = slice(row, row + 1)
        streams = self.image.part(one, self.case.image_tokens), self.text.part(one, length)
        q, k, v = join_in_torch(*streams, self.preparation)
        heads_first = (each.float().transpose(1, 2) for each in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads_first)
        joined = attended.transpose(1, 2).flatten(2)
        return joined[:, : self.case.image_tokens], joined[:, self.case.image_tokens :]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().mean() > 0.05
    assert found.shape == expected.shape
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error < 0.02


def assert_same(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.float().abs().mean() > 0.01
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@needs_a_card
@pytest.mark.invariant("ATTN-INV-003")
@pytest.mark.parametrize("lengths", [(256, 10), (10, 256), (256, 256), (100, 100)])
def test_a_card_gives_each_sample_what_it_gets_alone(lengths: tuple[int, ...]) -> None:
    card = OnCard()
    image, text = card.attend(lengths)
    for row, length in enumerate(lengths):
        of_image, of_text = card.alone(row, length)
        assert_near(image[row : row + 1], of_image)
        assert_near(text[row : row + 1, :length], of_text)
        assert not text[row, length:].any()


@pytest.mark.gpu
@needs_a_card
@pytest.mark.invariant("ATTN-INV-009")
def test_two_streams_give_the_same_every_time() -> None:
    """Other work takes and gives back memory around each call, as the layers of a block do."""
    card, random = OnCard(), torch.Generator().manual_seed(3)
    choices = [(256, 10), (10, 256), (256, 256), (37, 200), (1, 255)]
    expected = {lengths: card.attend(lengths) for lengths in choices}
    torch.cuda.synchronize()
    for _ in range(200):
        lengths = choices[int(torch.randint(len(choices), (1,), generator=random))]
        torch.full((2, 1280, 3072), torch.nan, device="cuda", dtype=torch.bfloat16)
        fresh = card.copy()
        found = fresh.attend(lengths)
        del fresh
        torch.full((2, 1280, 3072), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert_same(found, expected[lengths])


@pytest.mark.gpu
@needs_a_card
@pytest.mark.invariant("ATTN-INV-009")
def test_a_graph_replays_both_streams() -> None:
    card = OnCard()
    eager = card.attend(LENGTHS)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        card.attend(LENGTHS)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = card.attend(LENGTHS)
    for _ in range(20):
        for each in replayed:
            each.fill_(torch.nan)
        graph.replay()
        assert_same(replayed, eager)
    card.image.q.mul_(0.5)
    card.image.v.mul_(2)
    changed = card.attend(LENGTHS)
    graph.replay()
    assert_same(replayed, changed)
    assert not torch.equal(changed[0], eager[0])
