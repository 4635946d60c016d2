"""Codec frames that have arrived at a stage and wait to be decoded."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.payloads import StageData
from omnistage.contracts.tensors import host_tensor


class FrameBuffer:
    """Frames in order, each of `num_codebooks` ids (None while none has arrived)."""

    def __init__(self) -> None:
        self.num_codebooks: int | None = None
        self._parts: deque[np.ndarray[Any, Any]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, data: StageData) -> None:
        """Tensor "codes" (k, num_codebooks) of integers, k may be 0. Raises `InvalidRequestError`
        for anything else."""
        if "codes" not in data.tensors:
            raise InvalidRequestError(
                "a generation stage takes a tensor 'codes' (frames, codebooks); the input has "
                f"{', '.join(map(repr, data.tensors)) or 'none'}"
            )
        codes = host_tensor(data.tensors["codes"]).numpy()
        if codes.ndim != 2 or codes.dtype.kind not in "iu":
            raise InvalidRequestError(
                f"'codes' must be integers of shape (frames, codebooks), got {codes.dtype} "
                f"of shape {codes.shape}"
            )
        if self.num_codebooks not in (None, codes.shape[1]):
            raise InvalidRequestError(
                f"'codes' had {self.num_codebooks} codebooks before and has {codes.shape[1]} now"
            )
        self.num_codebooks = codes.shape[1]
        if len(codes):
            self._parts.append(codes.astype(np.int64))
            self._count += len(codes)

    def first(self, count: int, padded_to: int) -> np.ndarray[Any, Any]:
        """(padded_to, num_codebooks) int64: the first `count` frames, then zeros."""
        found = np.zeros((padded_to, self.num_codebooks or 0), dtype=np.int64)
        at = 0
        for part in self._parts:
            if at == count:
                break
            take = min(len(part), count - at)
            found[at : at + take] = part[:take]
            at += take
        assert at == count
        return found

    def drop(self, count: int) -> None:
        self._count -= count
        while count:
            part = self._parts.popleft()
            if len(part) > count:
                self._parts.appendleft(part[count:])
            count -= min(count, len(part))
