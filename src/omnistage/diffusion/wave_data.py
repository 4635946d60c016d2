"""How a wave travels: the requests of all shares in one payload, and a share that failed."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from omnistage.contracts.errors import ErrorRecord, OmniError, from_record
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.diffusion.batching import pack, unpack

_SIZES, _ERROR = "share_sizes", "share_error"


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank runs. `is_own` false: another rank runs the same, whose result counts."""

    command: Command
    is_own: bool


def pack_wave(data: StageData, sizes: list[int]) -> StageData:
    """`data` (from `pack`) of all shares, one after the other, of which share i has `sizes[i]`."""
    return StageData(
        modality=data.modality, fields={**data.fields, _SIZES: sizes}, tensors=data.tensors
    )


def share_of(command: Command, place: int, *, fill: bool) -> Share | None:
    """The share of the ranks at `place` of the data dimension; None where none is left for them.
    With `fill` they run another's instead."""
    sizes: list[int] = command.data.fields[_SIZES]
    if place >= len(sizes) and not fill:
        return None
    first = sum(sizes[: place % len(sizes)])
    last = first + sizes[place % len(sizes)]
    identities: tuple[RequestIdentity, ...] = command.identities[first:last]
    own = Command(
        name=command.name,
        kind=command.kind,
        identities=identities,
        data=pack(unpack(command.data)[first:last]),
        lockstep=False,
    )
    return Share(command=own, is_own=place < len(sizes))


def nothing() -> StageData:
    """The result of a rank that had no share, or ran another's."""
    return pack([])


def failed_share(error: OmniError) -> StageData:
    fields = {_ERROR: msgspec.to_builtins(error.to_record())}
    return StageData(modality=Modality.IMAGE, fields=fields)


def failure_of_share(result: StageData) -> OmniError | None:
    """The error of `failed_share`, if the result is one."""
    record = result.fields.get(_ERROR)
    return None if record is None else from_record(msgspec.convert(record, ErrorRecord))
