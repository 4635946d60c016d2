"""Images of blocks: where tensors lie in them, views of them on the host, and equal shares of them.

torch is imported lazily: a layout can be made and compared without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.memory.offload.host import HostBlock, HostPiece, TensorPlace, aligned

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The image of the module at `path`, without bytes."""

    path: str
    places: tuple[TensorPlace, ...]
    nbytes: int


def image_layout(
    tensors: Mapping[str, tuple[Sequence[int], str]],
) -> tuple[tuple[TensorPlace, ...], int]:
    """Places for tensors of these shapes and dtypes (torch's names), in their order, each aligned,
    and the bytes of the image."""
    places: list[TensorPlace] = []
    offset_bytes = 0
    for name, (shape, dtype) in tensors.items():
        place = TensorPlace(name=name, offset_bytes=offset_bytes, shape=tuple(shape), dtype=dtype)
        places.append(place)
        offset_bytes = aligned(offset_bytes + place.nbytes)
    return tuple(places), offset_bytes


def view(image: torch.Tensor, place: TensorPlace, start_bytes: int = 0) -> torch.Tensor:
    """The tensor of a place in 1-D uint8 bytes that begin at `start_bytes` of the image; no copy.

    The bytes must be aligned to the tensor's items.
    """
    import torch

    dtype = getattr(torch, place.dtype)
    if not place.nbytes:
        return torch.empty(place.shape, dtype=dtype, device=image.device)
    offset_bytes = place.offset_bytes - start_bytes
    return image[offset_bytes : offset_bytes + place.nbytes].view(dtype).view(place.shape)


def host_views(block: HostBlock) -> dict[str, torch.Tensor]:
    """Every tensor of a block where it lies on the host, by name; no copy."""
    import torch

    views: dict[str, torch.Tensor] = {}
    for place in block.places:
        if not place.nbytes:
            views[place.name] = view(torch.empty(0, dtype=torch.uint8), place)
            continue
        piece = next(piece for piece in block.pieces if _holds(piece, place))
        views[place.name] = view(piece.source, place, piece.offset_bytes)
    return views


def _holds(piece: HostPiece, place: TensorPlace) -> bool:
    end_bytes = piece.offset_bytes + piece.source.numel()
    return piece.offset_bytes <= place.offset_bytes and place.offset_bytes + place.nbytes <= (
        end_bytes
    )


def fill(destination: torch.Tensor, pieces: Iterable[HostPiece]) -> None:
    """Make the 1-D uint8 `destination` the image, or the share of it, that the pieces make up;
    gaps become zero."""
    destination.zero_()
    for piece in pieces:
        end_bytes = piece.offset_bytes + piece.source.numel()
        destination[piece.offset_bytes : end_bytes].copy_(piece.source)


def shard_bytes(block: HostBlock, count: int) -> int:
    """What one of `count` equal shares of a block's image takes; the last ones may lie beyond it,
    so `count` shares may be longer than the image."""
    return aligned(-(-block.nbytes // count))


def shard_of(block: HostBlock, index: int, count: int) -> list[HostPiece]:
    """The pieces of share `index` of `count`: bytes `[index * n, (index + 1) * n)` of the image, n
    being `shard_bytes`, at offsets counted from the share's own start. Where pieces leave gaps,
    whoever copies decides what is there; `fill` writes zeros."""
    size_bytes = shard_bytes(block, count)
    start_bytes, stop_bytes = index * size_bytes, (index + 1) * size_bytes
    shares = []
    for piece in block.pieces:
        begin = max(start_bytes, piece.offset_bytes)
        end = min(stop_bytes, piece.offset_bytes + piece.source.numel())
        if begin < end:
            source = piece.source[begin - piece.offset_bytes : end - piece.offset_bytes]
            shares.append(HostPiece(source=source, offset_bytes=begin - start_bytes))
    return shares
