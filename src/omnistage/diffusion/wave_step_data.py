"""How a command of step mode travels to several ranks: a share for each lane of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.diffusion.active import KINDS
from omnistage.diffusion.batching import pack, unpack

SHARES = "shares"
"""The name of such a command, and of its field that holds (place, name, size) of each."""
_ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """`command` of step mode for the requests of the ranks at `place` of the data dimension."""

    place: int
    command: Command


def pack_shares(shares: Sequence[StepShare], kind: str) -> Command:
    """One command for all ranks, with the deadline of `kind`."""
    packed = pack([share.command.data for share in shares])
    heads = [[one.place, one.command.name, len(one.command.identities)] for one in shares]
    return Command(
        name=SHARES,
        kind=kind,
        identities=tuple(each for one in shares for each in one.command.identities),
        data=StageData(
            modality=packed.modality,
            fields={**packed.fields, SHARES: heads},
            tensors=packed.tensors,
        ),
    )


def unpack_shares(command: Command) -> list[StepShare]:
    """What `pack_shares` was given, in order."""
    shares, first = [], 0
    parts = unpack(command.data)
    for (place, name, size), data in zip(command.data.fields[SHARES], parts, strict=True):
        assert isinstance(data, StageData)
        identities = command.identities[first : first + size]
        own = Command(name=name, kind=KINDS[name], identities=identities, data=data)
        shares.append(StepShare(place=place, command=own))
        first += size
    return shares


def aborted() -> StageData:
    """The result of a share of which nothing was done, because another rank could not go on."""
    return StageData(modality=Modality.LATENT, fields={_ABORTED: True})


def any_aborted(results: Iterable[StageData]) -> bool:
    return any(_ABORTED in one.fields for one in results)
