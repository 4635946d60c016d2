"""What decode steps read from the device: buffers that stay in place, filled before each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.attention.paged import SPARE_BLOCK

if TYPE_CHECKING:
    import numpy as np
    import torch

_ROW, _SLOT, _CONTEXT, _PLACE, _POSITIONS = range(5)
ALL_ALLOWED = -1
"""A word of a grammar's bitmask that allows each of its 32 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """One sequence's next token: its device row, its index in the sequence, its position (index
    plus `position_delta`), and its block table's length."""

    row: int
    index: int
    position: int
    slot: int
    num_blocks: int
    bitmask: np.ndarray | None = None


class DecodeInput:
    """Rows are padded with the spare row `max_num_seqs`, which writes to the spare block.

    By device row, kept between steps: `tables` (max_num_seqs + 1, table_width) int32 block tables,
    `last_tokens` (max_num_seqs + 1,) int64. By place in the batch, for `size` rows of the step that
    `fill` prepared: the methods. With `fixed_width`, block tables are always full width, as a
    captured graph needs them.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        position_rows: int,
        table_width: int,
        vocab_size: int,
        device: str,
    ) -> None:
        import torch

        self.max_num_seqs, self.table_width, self.device = max_num_seqs, table_width, device
        self.fixed_width = False
        self.width = table_width
        self._words = -(-vocab_size // 32)
        self._fields = torch.zeros(
            _POSITIONS + position_rows, max_num_seqs, dtype=torch.int64, device=device
        )
        self._bitmask: torch.Tensor | None = None
        rows = max_num_seqs + 1
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = torch.full((rows, table_width), SPARE_BLOCK, dtype=torch.int32, device=device)
        self._pins = device != "cpu"

    def set_table(self, row: int, blocks: Sequence[int]) -> None:
        """Places beyond `blocks` keep what they had: nobody reads beyond a context."""
        table = self.host_tensor([blocks], "int32")
        self.tables[row, : len(blocks)].copy_(table[0], non_blocking=True)

    def fill(self, rows: Sequence[DecodeRow], size: int) -> None:
        """Prepare a step of `rows`, padded to `size`."""
        padding = size - len(rows)
        fields = [
            [row.row for row in rows] + [self.max_num_seqs] * padding,
            [row.slot for row in rows] + [0] * padding,
            [row.index + 1 for row in rows] + [1] * padding,
            [row.index + 1 for row in rows] + [1] * padding,
        ]
        positions = [row.position for row in rows] + [0] * padding
        fields += [positions] * (self._fields.shape[0] - _POSITIONS)
        self._fields[:, :size].copy_(self.host_tensor(fields), non_blocking=True)
        widest = max((row.num_blocks for row in rows), default=1)
        self.width = self.table_width if self.fixed_width else widest
        if any(row.bitmask is not None for row in rows):
            masks = [row.bitmask for row in rows]
            self.bitmask_buffer()[:size].copy_(self.host_bitmask(masks, size), non_blocking=True)

    def rows(self, size: int) -> torch.Tensor:
        """(size,) int64."""
        return self._fields[_ROW, :size]

    def slots(self, size: int) -> torch.Tensor:
        """(size,) int64: where each token's key and value go."""
        return self._fields[_SLOT, :size]

    def context_lens(self, size: int) -> torch.Tensor:
        """(size,) int32."""
        import torch

        return self._fields[_CONTEXT, :size].to(torch.int32)

    def sample_places(self, size: int) -> torch.Tensor:
        """(size,) int64: how many tokens stand before the one to be sampled."""
        return self._fields[_PLACE, :size]

    def positions(self, size: int) -> torch.Tensor:
        """(position_rows, size) int64."""
        return self._fields[_POSITIONS:, :size]

    def token_ids(self, size: int) -> torch.Tensor:
        """(size,) int64: what each row sampled last."""
        return self.last_tokens[self.rows(size)]

    def block_tables(self, size: int) -> torch.Tensor:
        """(size, width) int32."""
        return self.tables[:, : self.width][self.rows(size)]

    def bitmask(self, size: int) -> torch.Tensor:
        """(size, ceil(vocab_size / 32)) int32."""
        return self.bitmask_buffer()[:size]

    def bitmask_buffer(self) -> torch.Tensor:
        """Made when first needed; call it before capturing a graph with grammars."""
        import torch

        if self._bitmask is None:
            self._bitmask = torch.full(
                (self.max_num_seqs, self._words), ALL_ALLOWED, dtype=torch.int32, device=self.device
            )
        return self._bitmask

    def host_bitmask(self, masks: Sequence[np.ndarray | None], size: int) -> torch.Tensor:
        """(size, ceil(vocab_size / 32)) int32 on the host; a row without a mask allows all."""
        import numpy as np
        import torch

        words = np.full((size, self._words), ALL_ALLOWED, dtype=np.int32)
        for index, mask in enumerate(masks):
            if mask is not None:
                words[index] = mask[: self._words]
        host = torch.from_numpy(words)
        return host.pin_memory() if self._pins else host

    def host_tensor(self, values: Sequence[Sequence[int]], dtype: str = "int64") -> torch.Tensor:
        """On the host, pinned where that makes a copy asynchronous: torch keeps the memory until
        the copy is done."""
        import torch

        host = torch.tensor(values, dtype=getattr(torch, dtype))
        return host.pin_memory() if self._pins else host
