"""The voices of a checkpoint: `spk_dict.pt`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.contracts.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FILE_NAME = "spk_dict.pt"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Voice:
    """`bos_id` is the text id that opens speech; condition (1, enc_emb_dim) and reference_mel
    (1, frames, mel_dim), float32 on the host, are what token2wav imitates."""

    bos_id: int
    condition: torch.Tensor
    reference_mel: torch.Tensor

    def on(self, device: str) -> Voice:
        return replace(
            self,
            condition=self.condition.to(device),
            reference_mel=self.reference_mel.to(device),
        )


def read_voices(folder: Path) -> dict[str, Voice]:
    """By the checkpoint's names. Raises `CheckpointError` saying what is wrong with the file."""
    import torch

    path = folder / FILE_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {FILE_NAME}, the file of its voices")
    try:
        # The release has its voices in this format alone; it unpickles tensors, numbers and
        # dictionaries and refuses everything else.
        content = torch.load(path, map_location="cpu", weights_only=True)
        found = {
            str(name): Voice(
                bos_id=int(voice["bos_token"]),
                condition=voice["cond"].float().reshape(1, -1),
                reference_mel=voice["ref_mel"].float().reshape(1, *voice["ref_mel"].shape[-2:]),
            )
            for name, voice in content.items()
        }
    except Exception as error:  # the file is the user's: what the library raises for it varies
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} holds no voices: {type(error).__name__}: {reason}"
        ) from error
    if not found:
        raise CheckpointError(f"{path} holds no voices")
    return found
