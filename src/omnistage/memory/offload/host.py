"""Weights that wait on the host: what a streamed block is made of and where its bytes lie.

A block's weights have one **image**: a run of bytes in which every tensor has its place. The image
is what a device slot holds while the block runs; on the host its bytes lie in one or more pieces.
Copying all pieces to their offsets makes the image. Nobody who streams needs to know of files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from omnistage.contracts.tensors import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import Platform

ALIGNMENT_BYTES = 256
"""Of every tensor in an image, and of an image's size: what the most demanding matrix kernels look
at (cuBLASLt), so that they choose as they do for tensors of torch's own allocator."""


class HostBacking(StrEnum):
    """Where the host keeps streamed weights."""

    CHECKPOINT = "checkpoint"
    """Pages of the checkpoint's own files, mapped read-only and shared."""
    RUNTIME_CACHE = "runtime_cache"
    """Pages of an entry of the runtime cache, mapped read-only and shared."""
    PRIVATE = "private"
    """Memory of this process, page-locked where the platform can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """One parameter or buffer in its block's image.

    `name` is relative to the component ("transformer_blocks.3.attn.to_q.weight"); `dtype` is
    torch's name; `offset_bytes` is a multiple of `ALIGNMENT_BYTES`.
    """

    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostPiece:
    """Adjacent bytes on the host that are copied as one: `source` is 1-D uint8 on the CPU and goes
    to `offset_bytes` of the image."""

    source: torch.Tensor
    offset_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class HostBlock:
    """One streamed module. `path` is its name in the component ("transformer_blocks.3"); its image
    has `nbytes` bytes, of which the gaps between places mean nothing."""

    path: str
    nbytes: int
    places: tuple[TensorPlace, ...]
    pieces: tuple[HostPiece, ...]

    @property
    def copied_bytes(self) -> int:
        """What one transfer moves."""
        return sum(piece.source.numel() for piece in self.pieces)


class HostWeights(Protocol):
    """The streamed blocks of one component, ready to be copied from. Owned by whoever streams."""

    backing: HostBacking
    blocks: Mapping[str, HostBlock]
    """By path, in the order of the module's own blocks."""

    @property
    def is_page_locked(self) -> bool:
        """Whether the device can copy from the pieces without staging."""

    @property
    def locked_bytes(self) -> int:
        """Whole pages; 0 when not locked."""

    def page_lock(self, platform: Platform, device: str, limit_bytes: int | None) -> bool:
        """Page-lock all of it or nothing. False when it would take more than `limit_bytes` (None:
        no limit) or the platform refuses; then nothing is locked. Raises `StageLostError` when
        what was locked before a refusal cannot be undone."""

    def check(self, path: str) -> None:
        """Raises `CheckpointError` when the bytes of a block are known to be wrong; waits for a
        check that is still running. Called before a block's first copy."""

    def close(self) -> None:
        """Unlock, then unmap. Nothing may be copying any more. Idempotent."""


def aligned(nbytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The next multiple."""
    return -(-nbytes // alignment_bytes) * alignment_bytes
