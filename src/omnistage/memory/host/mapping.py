"""Host memory as bytes of a tensor: files mapped read-only and shared, and private regions.

Whoever has a tensor of a memory keeps it mapped: `close` gives up what the memory itself holds, and
the pages go when the last tensor does. Nothing is ever unmapped under a tensor.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage.contracts.errors import CheckpointError

if TYPE_CHECKING:
    import torch

PAGE_BYTES = mmap.PAGESIZE


class HostMemory:
    """A mapping. `address` is where it begins, a multiple of the page size; it extends over whole
    pages, also where `nbytes` does not."""

    read_only = False

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self._mapping: mmap.mmap | None = mapping
        self._bytes: torch.Tensor | None = None
        self.nbytes = nbytes
        self.address: int = np.frombuffer(mapping, dtype=np.uint8).ctypes.data

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, 1-D uint8, without a copy. Writing to read-only memory ends the process."""
        import torch

        if self._bytes is None:
            source = _Source(self.mapping, self.address, self.nbytes)
            self._bytes = torch.from_numpy(np.asarray(source))
        return self._bytes

    @property
    def mapping(self) -> mmap.mmap:
        """Keeps the pages mapped while it lives."""
        assert self._mapping is not None, "closed"
        return self._mapping

    @property
    def is_closed(self) -> bool:
        return self._mapping is None

    def close(self) -> None:
        """Idempotent. Page locks must have been released."""
        self._mapping = self._bytes = None


class MappedFile(HostMemory):
    """A file's pages, shared with everybody who maps it; opened and mapped for reading only.

    `expected_bytes` is the size it must have: beyond its end, reading would end the process. For
    the same reason nobody may truncate it later, as long as it is not page-locked. Raises
    `CheckpointError` when it cannot be opened or has another size.
    """

    read_only = True

    def __init__(self, path: Path, expected_bytes: int | None = None) -> None:
        self.path = path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes == 0 or expected_bytes not in (None, size_bytes):
                raise CheckpointError(
                    f"{path} has {size_bytes} bytes, expected {expected_bytes or 'some'}: it was "
                    "truncated or replaced; download it again"
                )
            mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)
        super().__init__(mapping, size_bytes)

    def will_need(self, offset_bytes: int, nbytes: int) -> None:
        """Let the system start reading a part of it ahead of its use."""
        start_bytes = offset_bytes // PAGE_BYTES * PAGE_BYTES
        length = min(offset_bytes + nbytes, self.nbytes) - start_bytes
        if length > 0:
            self.mapping.madvise(mmap.MADV_WILLNEED, start_bytes, length)


class AnonymousMemory(HostMemory):
    """Memory of this process alone, zero at first; pages exist once they are written."""

    def __init__(self, nbytes: int) -> None:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages: smaller ones do
            mapping.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(mapping, nbytes)


class _Source:
    """What numpy makes an array of that holds on to its mapping. Declared writable, since torch
    warns of arrays that are not and has no read-only tensors."""

    def __init__(self, mapping: mmap.mmap, address: int, nbytes: int) -> None:
        self._mapping = mapping
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }
