"""State of many streams in tensors of fixed place: one row a stream, gathered and written back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnistage.contracts.errors import InternalError

if TYPE_CHECKING:
    import torch


class StatePool:
    """`num_streams` rows for streams and a spare one, `spare_row`, for the padding of a batch.

    Tensors stay where they are, so that captured work may read and write them. On a CPU a row takes
    memory once it is used.
    """

    def __init__(self, num_streams: int, device: str) -> None:
        self.num_streams = num_streams
        self.spare_row = num_streams
        self.tensors: dict[str, torch.Tensor] = {}
        self._device = device
        self._free = list(reversed(range(num_streams)))

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """One more tensor (rows, *shape), all zero."""
        import torch

        assert name not in self.tensors
        self.tensors[name] = torch.zeros(
            (self.num_streams + 1, *shape), dtype=dtype, device=self._device
        )

    @property
    def bytes_per_stream(self) -> int:
        return sum(
            math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in self.tensors.values()
        )

    @property
    def num_taken(self) -> int:
        return self.num_streams - len(self._free)

    def take_row(self) -> int:
        """A row, all zero. Raises `InternalError` when there is none: who schedules counts."""
        if not self._free:
            raise InternalError(f"all {self.num_streams} rows of stream state are taken")
        row = self._free.pop()
        for tensor in self.tensors.values():
            tensor[row].zero_()
        return row

    def free_row(self, row: int) -> None:
        assert 0 <= row < self.num_streams
        assert row not in self._free
        self._free.append(row)

    def read(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies (len(rows), …) of every tensor. Capturable."""
        return {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}

    def write(self, rows: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Capturable. Every tensor must have its value: none may be forgotten."""
        if values.keys() != self.tensors.keys():
            missing = sorted(self.tensors.keys() ^ values.keys())
            raise InternalError(f"stream state was not carried on: {', '.join(missing)}")
        for name, value in values.items():
            self.tensors[name].index_copy_(0, rows, value)
