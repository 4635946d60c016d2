"""The paged kernels of a GPU as a backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omnistage.attention import triton_chunks, triton_paged
from omnistage.attention.paged import PagedBackend, PagedKV, PagedStep


@dataclass(slots=True, eq=False)
class TritonPagedBackend(PagedBackend):
    """See `PagedBackend`. One a thread. `processors`: the device's multiprocessors."""

    processors: int
    _tiles: dict[int, triton_chunks.Tiles] = field(default_factory=dict)

    @classmethod
    def on(cls, device: str) -> TritonPagedBackend:
        return cls(torch.cuda.get_device_properties(device).multi_processor_count)

    def begin(self, step: PagedStep) -> None:
        self._tiles.clear()

    def write(
        self, kv: PagedKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        triton_paged.write(kv, _dense_rows(key), _dense_rows(value), slots)

    def write_and_decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: PagedKV,
        step: PagedStep,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """One kernel does both."""
        splits = triton_paged.splits_for(query.shape[0], kv.keys.shape[2], self.processors)
        return triton_paged.decode(
            query, kv, step.block_tables, step.context_lens,
            scale=scale, window=window, softcap=softcap, splits=splits,
            new=(_dense_rows(key), _dense_rows(value)),
        )  # fmt: skip

    def decode(
        self,
        query: torch.Tensor,
        kv: PagedKV,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        splits = triton_paged.splits_for(query.shape[0], kv.keys.shape[2], self.processors)
        return triton_paged.decode(
            query, kv, block_tables, context_lens,
            scale=scale, window=window, softcap=softcap, splits=splits,
        )  # fmt: skip

    def chunks(
        self,
        query: torch.Tensor,
        kv: PagedKV,
        step: PagedStep,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """All chunks of a step by one kernel."""
        heads, kv_heads = query.shape[1], kv.keys.shape[2]
        group = heads // kv_heads
        if group not in self._tiles:
            starts = [sum(step.chunk_lens[:index]) for index in range(len(step.chunk_lens))]
            self._tiles[group] = triton_chunks.plan_tiles(
                starts, step.chunk_lens, step.chunk_contexts, group, query.device
            )
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = query.new_empty(query.shape[0], heads, kv.values.shape[3])
        triton_chunks.attend_chunks(
            query, kv, step.block_tables[step.num_decodes :], self._tiles[group], out,
            scale=scale, window=window, softcap=softcap,
        )  # fmt: skip
        return out


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """(T, heads, dim) whose last two dimensions are dense."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
