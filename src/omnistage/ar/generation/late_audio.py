"""From waveforms on the device to the payloads that leave the stage, off the executing thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnistage.ar.payloads import HostCopier, HostCopy
from omnistage.contracts.errors import InternalError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import ExecutionContext

if TYPE_CHECKING:
    import torch


def send_audio(
    copier: HostCopier,
    context: ExecutionContext,
    identities: Sequence[RequestIdentity],
    waves: Sequence[torch.Tensor],
    sample_rate: int,
) -> None:
    """waves: float32 (n,) each. The executing thread only starts their copies."""
    copies = copier.at_once({str(index): wave for index, wave in enumerate(waves)})
    for index, identity in enumerate(identities):
        context.finish_later(
            identity, lambda name=str(index): audio_payload(copies, name, sample_rate)
        )


def audio_payload(copies: HostCopy, name: str, sample_rate: int) -> StageData:
    """Raises `InternalError` for numbers that are not finite: no garbage leaves in silence."""
    import numpy as np

    audio = copies.wait()[name].numpy()
    if not np.isfinite(audio).all():
        raise InternalError("the codec decoder produced invalid numbers (NaN or infinity)")
    return StageData(
        modality=Modality.AUDIO, tensors={"audio": audio}, fields={"sample_rate": sample_rate}
    )
