"""One payload out of a child's and its companions'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omnistage.contracts.payloads import InlineFrame, PayloadRef, TensorRef

MAIN_ROLE = "main"


def join_payloads(
    parts: Mapping[str, tuple[PayloadRef, tuple[Any, ...]]],
) -> tuple[PayloadRef, tuple[Any, ...]]:
    """Merge handles without touching bytes: names of all roles but "main" get `"<role>."` before
    them, inline frames are renumbered."""
    fields: dict[str, Any] = {}
    tensors: dict[str, TensorRef] = {}
    frames: list[Any] = []
    nbytes = 0
    for role, (payload, own_frames) in parts.items():
        prefix = "" if role == MAIN_ROLE else f"{role}."
        fields |= {prefix + name: value for name, value in payload.fields.items()}
        for name, ref in payload.tensors.items():
            tensors[prefix + name] = _shifted(ref, len(frames))
        frames.extend(own_frames)
        nbytes += payload.nbytes
    main = parts[MAIN_ROLE][0]
    joined = PayloadRef(modality=main.modality, fields=fields, tensors=tensors, nbytes=nbytes)
    return joined, tuple(frames)


def _shifted(ref: TensorRef, by: int) -> TensorRef:
    if not isinstance(ref.place, InlineFrame):
        return ref
    return msgspec.structs.replace(ref, place=InlineFrame(ref.place.index + by))
