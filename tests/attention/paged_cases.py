"""Cases of paged decoding, for Triton's interpreter (`python -m`) and for a card."""

from __future__ import annotations

from typing import NamedTuple

import torch

from omnistage.attention.paged import PagedKV


class Case(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    splits: int = 1
    lengths: tuple[int, ...] = (37, 1, 90)
    dtype: torch.dtype = torch.float32
    writes: bool = False


SMALL_CASES = (
    Case(8, 2, 16, 16),
    Case(8, 2, 16, 16, splits=4),
    Case(4, 1, 24, 40, window=7, splits=2),
    Case(6, 3, 80, 80, softcap=5.0, splits=2),
    Case(3, 3, 32, 32, window=64, splits=8),
    Case(8, 2, 16, 16, splits=4, writes=True, lengths=(37, 1, 90, 64)),
    Case(4, 1, 24, 40, window=7, splits=16, writes=True, lengths=(33, 17)),
)
BLOCK = 16


def decode_and_reference(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' result and that of plain torch operations in float64, both (S, heads, dim)."""
    from omnistage.attention import triton_paged

    draw = torch.Generator().manual_seed(0)
    blocks = sum(-(-n // BLOCK) for n in case.lengths) + 1
    kv = PagedKV(
        torch.zeros(blocks, BLOCK, case.kv_heads, case.head_dim, dtype=case.dtype, device=device),
        torch.zeros(blocks, BLOCK, case.kv_heads, case.value_dim, dtype=case.dtype, device=device),
    )
    tables = torch.zeros(len(case.lengths), blocks, dtype=torch.int32)
    query = torch.randn(len(case.lengths), case.heads, case.head_dim, generator=draw)
    query = query.to(device, case.dtype)
    expected, newest, free = [], [], 1
    for row, length in enumerate(case.lengths):
        mine = torch.arange(free, free + -(-length // BLOCK)).flip(0)
        free += len(mine)
        tables[row, : len(mine)] = mine
        place = torch.arange(length)
        slots = (mine[place // BLOCK] * BLOCK + place % BLOCK).to(device)
        key = torch.randn(length, case.kv_heads, case.head_dim, generator=draw)
        value = torch.randn(length, case.kv_heads, case.value_dim, generator=draw)
        key, value = key.to(device, case.dtype), value.to(device, case.dtype)
        written = length - 1 if case.writes else length
        if written:
            triton_paged.write(kv, key[:written], value[:written], slots[:written])
        newest.append((key[-1], value[-1]))
        expected.append(_attend(case, query[row], key, value))
    got = triton_paged.decode(
        query,
        kv,
        tables.to(device),
        torch.tensor(case.lengths, dtype=torch.int32, device=device),
        scale=0.3,
        window=case.window,
        softcap=case.softcap,
        splits=case.splits,
        new=_stacked(newest) if case.writes else None,
    )
    return got, torch.stack(expected)


def _stacked(newest: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = zip(*newest, strict=True)
    return torch.stack(keys), torch.stack(values)


def chunks_and_reference(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The last queries of each sequence at once, by the kernel and by the torch backend's masks."""
    from omnistage.attention.paged import PagedStep
    from omnistage.attention.paged_torch import TorchPagedBackend
    from omnistage.attention.triton_backend import TritonPagedBackend

    draw = torch.Generator().manual_seed(1)
    blocks = sum(-(-n // BLOCK) for n in case.lengths) + 1
    shape = (blocks, BLOCK, case.kv_heads)
    kv = PagedKV(
        torch.randn(*shape, case.head_dim, generator=draw).to(device, case.dtype),
        torch.randn(*shape, case.value_dim, generator=draw).to(device, case.dtype),
    )
    tables, free = torch.zeros(len(case.lengths), blocks, dtype=torch.int32), 1
    for row, length in enumerate(case.lengths):
        tables[row, : -(-length // BLOCK)] = torch.arange(free, free + -(-length // BLOCK)).flip(0)
        free += -(-length // BLOCK)
    lens = tuple(max(1, n // 2 + n % 2) for n in case.lengths)
    query = torch.randn(sum(lens), case.heads, case.head_dim, generator=draw)
    query = query.to(device, case.dtype)
    how = {"scale": 0.3, "window": case.window, "softcap": case.softcap}
    results = []
    for backend in (TritonPagedBackend(processors=8), TorchPagedBackend()):
        step = PagedStep(
            num_decodes=0,
            slots=torch.zeros(0, dtype=torch.int64, device=device),
            block_tables=tables.to(device),
            context_lens=torch.tensor(case.lengths, dtype=torch.int32, device=device),
            chunk_lens=lens,
            chunk_contexts=case.lengths,
            kv=[kv],
            backend=backend,
        )
        backend.begin(step)
        results.append(backend.chunks(query, kv, step, **how))
    return results[0], results[1].double()


def _attend(
    case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    group = case.heads // case.kv_heads
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("hd,nhd->hn", query.double(), key) * 0.3
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.window is not None:
        scores[:, : max(0, key.shape[0] - case.window)] = float("-inf")
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), value)


def compare(case: Case, device: str) -> None:
    limit = 1e-5 if case.dtype is torch.float32 else 2e-2
    for make in (decode_and_reference, chunks_and_reference):
        got, expected = make(case, device)
        assert expected.abs().max() > 0.5, "the reference is near zero"
        assert (got.double() - expected).abs().max() < limit, (make, case)
        assert (got.double().roll(1, 1) - expected).abs().max() > limit, "heads do not matter"


if __name__ == "__main__":
    for each in SMALL_CASES:
        compare(each, "cpu")
    print(f"{len(SMALL_CASES)} cases agree")
