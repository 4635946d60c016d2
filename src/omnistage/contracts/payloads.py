"""Data between stages: in memory (`StageData`) and as a routable handle (`PayloadRef`).

The orchestrator passes handles on without looking at the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from omnistage.contracts.modalities import Modality


@dataclass(slots=True, kw_only=True)
class StageData:
    """What one stage hands to the next, or to the client.

    `fields` holds plain values (None, bool, int, float, str, bytes, lists and string-keyed maps),
    `tensors` numpy arrays, torch tensors or `HostTensor`s by name.
    """

    modality: Modality
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)


class InlineFrame(msgspec.Struct, frozen=True, tag="inline", forbid_unknown_fields=True):
    """The bytes travel as frame number `index` behind the message."""

    index: int


class SharedSegment(msgspec.Struct, frozen=True, tag="segment", forbid_unknown_fields=True):
    """The bytes lie at `offset` of an anonymous memory file that process `pid` holds open as
    descriptor `fd`; `token` proves that it is still the same file."""

    pid: int
    fd: int
    token: str
    offset: int


class TensorRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    place: InlineFrame | SharedSegment


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StageData` on its way. `handle` names it at its producer until it is acknowledged."""

    modality: Modality
    fields: dict[str, Any] = {}
    tensors: dict[str, TensorRef] = {}
    handle: str | None = None
    nbytes: int = 0
