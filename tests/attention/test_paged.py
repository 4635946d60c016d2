"""Paged attention against plain causal attention over each sequence by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from omnistage.attention.paged import PagedKV, PagedStep, paged_attention, running
from omnistage.attention.paged_torch import TorchPagedBackend
from omnistage.contracts.errors import UnsupportedCombinationError

BLOCK_SIZE = 4
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
NUM_BLOCKS = 40


def plain(q, k, v, *, scale, window=None, softcap=None):
    """q (t, H, D), k and v (L, Hkv, D): the last t of L positions, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length, context = q.shape[0], k.shape[0]
    behind = torch.arange(context - length, context)[:, None] - torch.arange(context)
    hidden = (behind < 0) | (behind >= (window or context))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v)


class Sequence:
    def __init__(self, context: int, new: int, blocks: list[int]) -> None:
        self.context, self.new, self.blocks = context, new, blocks
        self.key = torch.randn(context, KV_HEADS, HEAD_DIM)
        self.value = torch.randn(context, KV_HEADS, HEAD_DIM)
        self.query = torch.randn(new, HEADS, HEAD_DIM)

    def slots(self, first: int, last: int) -> list[int]:
        return [
            self.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, last)
        ]


def sequences() -> list[Sequence]:
    """Decodes and chunks, in runs of blocks and in scattered ones."""
    torch.manual_seed(0)
    return [
        Sequence(9, 1, [3, 4, 5]),
        Sequence(6, 1, [9, 7]),
        Sequence(1, 1, [12]),
        Sequence(7, 7, [20, 21]),
        Sequence(11, 5, [30, 15, 31]),
        Sequence(13, 2, [32, 33, 34, 35]),
    ]


def run(rows: list[Sequence], **arguments):
    kv = PagedKV(
        torch.full((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), float("nan")),
        torch.full((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), float("nan")),
    )
    backend = TorchPagedBackend()
    for row in rows:
        before = row.context - row.new
        slots = torch.tensor(row.slots(0, before), dtype=torch.int64)
        backend.write(kv, row.key[:before], row.value[:before], slots)
    width = max(len(row.blocks) for row in rows)
    step = PagedStep(
        num_decodes=sum(row.new == 1 for row in rows),
        slots=torch.tensor([s for r in rows for s in r.slots(r.context - r.new, r.context)]),
        block_tables=torch.tensor(
            [row.blocks + [0] * (width - len(row.blocks)) for row in rows], dtype=torch.int32
        ),
        context_lens=torch.tensor([row.context for row in rows], dtype=torch.int32),
        chunk_lens=tuple(row.new for row in rows if row.new > 1),
        chunk_contexts=tuple(row.context for row in rows if row.new > 1),
        kv=[kv],
        backend=backend,
    )
    packed = [
        torch.cat([part(row) for row in rows]).transpose(0, 1).unsqueeze(0)
        for part in (
            lambda row: row.query,
            lambda row: row.key[row.context - row.new :],
            lambda row: row.value[row.context - row.new :],
        )
    ]
    with running(step):
        attended, weights = paged_attention(
            SimpleNamespace(layer_idx=0), *packed, None, **arguments
        )
    assert weights is None
    return attended[0].split([row.new for row in rows])


@pytest.mark.invariant("ATTN-INV-011")
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_packed_rows_attend_as_each_would_alone(window, softcap, scaling):
    rows = sequences()
    results = run(rows, sliding_window=window, softcap=softcap, scaling=scaling, dropout=0.0)
    for row, result in zip(rows, results, strict=True):
        expected = plain(
            row.query,
            row.key,
            row.value,
            scale=scaling or HEAD_DIM**-0.5,
            window=window,
            softcap=softcap,
        )
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.invariant("ATTN-INV-012")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"s_aux": torch.zeros(HEADS)}, "s_aux"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(arguments, named):
    with pytest.raises(UnsupportedCombinationError, match=named):
        run(sequences(), **arguments)


def test_what_changes_nothing_is_taken():
    plainly = run(sequences())
    with_extras = run(sequences(), position_ids=torch.zeros(1, 1), use_cache=False, s_aux=None)
    assert all(torch.equal(a, b) for a, b in zip(plainly, with_extras, strict=True))


@pytest.mark.invariant("ATTN-INV-012")
def test_a_mask_is_refused():
    q = torch.zeros(1, HEADS, 1, HEAD_DIM)
    kv = PagedKV(torch.zeros(2, 4, KV_HEADS, HEAD_DIM), torch.zeros(2, 4, KV_HEADS, HEAD_DIM))
    step = PagedStep(
        num_decodes=1,
        slots=torch.tensor([4]),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        context_lens=torch.tensor([1], dtype=torch.int32),
        kv=[kv],
        backend=TorchPagedBackend(),
    )
    k = torch.zeros(1, KV_HEADS, 1, HEAD_DIM)
    with running(step), pytest.raises(UnsupportedCombinationError, match="attention_mask"):
        paged_attention(SimpleNamespace(layer_idx=0), q, k, k, torch.zeros(1, 1, 1, 1))


@pytest.mark.invariant("ATTN-INV-012")
def test_attention_outside_of_a_step_is_an_error():
    q = torch.zeros(1, HEADS, 1, HEAD_DIM)
    with pytest.raises(RuntimeError, match="outside of a step"):
        paged_attention(SimpleNamespace(layer_idx=0), q, q, q, None)
