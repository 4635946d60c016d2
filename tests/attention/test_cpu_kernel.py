"""The compiled kernel of decode rows against plain attention, and what happens without it."""

from __future__ import annotations

import pytest
import torch

from omnistage.attention import cpu_kernel
from omnistage.attention.paged import PagedKV
from tests.attention.test_paged import plain

KERNEL = cpu_kernel.decode_kernel()
needs_compiler = pytest.mark.skipif(KERNEL is None, reason="no C++ compiler")
NUM_BLOCKS = 250
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CONTEXTS = (1, 5, 16, 17, 63, 130)


class Case:
    def __init__(self, dtype, *, heads=6, kv_heads=2, dim=64, block_size=16):
        torch.manual_seed(0)
        size = (NUM_BLOCKS, block_size, kv_heads, dim)
        self.kv = PagedKV(*(torch.full(size, float("nan"), dtype=dtype) for _ in range(2)))
        self.width = -(-max(CONTEXTS) // block_size)
        order = torch.randperm(NUM_BLOCKS - 1) + 1
        self.rows, tables = [], []
        for context in CONTEXTS:
            used = -(-context // block_size)
            blocks, order = order[:used], order[used:]
            slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:context]
            key, value = (torch.randn(context, kv_heads, dim, dtype=dtype) for _ in range(2))
            self.kv.keys.flatten(0, 1)[slots] = key
            self.kv.values.flatten(0, 1)[slots] = value
            self.rows.append((key, value))
            tables.append(torch.cat([blocks, torch.zeros(self.width - used, dtype=torch.int64)]))
        self.tables = torch.stack(tables).to(torch.int32)
        self.contexts = torch.tensor(CONTEXTS, dtype=torch.int32)
        by_head = torch.randn(heads, len(CONTEXTS), dim, dtype=dtype)
        self.query = by_head.transpose(0, 1)  # As layers hand it over: not contiguous.

    def attend(self, rows=slice(None), *, scale=0.3, window=None, softcap=None):
        assert cpu_kernel.usable(self.query, self.kv.keys, self.kv.values)
        how = {"scale": scale, "window": window, "softcap": softcap}
        return cpu_kernel.decode(
            KERNEL,
            self.query[rows],
            self.kv.keys,
            self.kv.values,
            self.tables[rows].contiguous(),
            self.contexts[rows].contiguous(),
            **how,
        )


@needs_compiler
@pytest.mark.invariant("ATTN-INV-014")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how", [{}, {"window": 20}, {"softcap": 2.0}, {"window": 3, "softcap": 5.0}], ids=str
)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dim": 16, "block_size": 1},
        {"dim": 80, "heads": 8, "kv_heads": 8},
        {"dim": 128, "heads": 8, "kv_heads": 1},
        {"dim": 256, "heads": 2, "block_size": 40},
    ],
    ids=str,
)
def test_it_is_plain_attention(dtype, how, shape):
    case = Case(dtype, **shape)
    found = case.attend(**how)
    for row, (key, value) in enumerate(case.rows):
        expected = plain(case.query[row : row + 1], key, value, scale=0.3, **how)[0]
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found[row].double(), expected, atol=tolerance, rtol=tolerance)


@needs_compiler
@pytest.mark.invariant("ATTN-INV-014")
def test_a_row_is_the_same_bits_whatever_runs_beside_it():
    case = Case(torch.float32)
    together = case.attend()
    for row in range(len(CONTEXTS)):
        assert torch.equal(case.attend(slice(row, row + 1))[0], together[row])


@needs_compiler
@pytest.mark.invariant("ATTN-INV-014")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_none(dtype):
    case = Case(dtype)
    slot = case.tables[4, 1]
    case.kv.values[slot, 3] = float("nan")
    case.kv.keys[case.tables[5, 0], 0] = float("nan")
    bad = ~torch.isfinite(case.attend()).flatten(1).all(dim=1)
    assert bad.tolist() == [False, False, False, False, True, True]


@pytest.mark.parametrize("dim", [8, 48])
@pytest.mark.invariant("ATTN-INV-014")
def test_sizes_that_there_is_no_code_for_are_not_usable(dim):
    query, cache = torch.zeros(2, 4, dim), torch.zeros(3, 16, 2, dim)
    assert not cpu_kernel.usable(query, cache, cache)


@pytest.mark.invariant("ATTN-INV-015")
def test_a_machine_without_a_compiler_says_so_and_serves(monkeypatch, caplog):
    monkeypatch.setattr(cpu_kernel.shutil, "which", lambda name: None)
    with caplog.at_level("WARNING", logger=cpu_kernel.logger.name):
        assert cpu_kernel.decode_kernel.__wrapped__() is None
    assert "no C++ compiler is installed" in caplog.text


@needs_compiler
@pytest.mark.invariant("ATTN-INV-015")
def test_a_compiler_that_fails_is_told_with_its_words(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(cpu_kernel, "FLAGS", ("-no-such-flag",))
    monkeypatch.setattr(cpu_kernel, "cache_folder", lambda: tmp_path)
    with caplog.at_level("WARNING", logger=cpu_kernel.logger.name):
        assert cpu_kernel.decode_kernel.__wrapped__() is None
    assert "no-such-flag" in caplog.text
    assert list(tmp_path.iterdir()) == []


@needs_compiler
@pytest.mark.invariant("ATTN-INV-015")
def test_it_is_compiled_once(tmp_path):
    compiler = next(filter(None, map(cpu_kernel.shutil.which, cpu_kernel.COMPILERS)))
    cpu_kernel.load(compiler, tmp_path)
    (library,) = tmp_path.iterdir()
    made = library.stat().st_mtime_ns
    cpu_kernel.load(compiler, tmp_path)
    assert library.stat().st_mtime_ns == made
