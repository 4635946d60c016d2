"""One waveform under way: its codes, and how far spectrogram and sound have come."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from omnistage.ar.generation.codec import CodecStream

if TYPE_CHECKING:
    import torch

    from omnistage.models.qwen2_5_omni.codes import SpeechSettings
    from omnistage.models.qwen2_5_omni.voices import Voice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spoken:
    """`frames` of the spectrogram are made, `sounded` of them have become sound. mel (n, mel_dim)
    are those from `mel_start` on; states (evaluations, p, mel_dim) is what the solver's evaluations
    saw of the last p frames."""

    frames: int = 0
    sounded: int = 0
    mel_start: int = 0
    mel: torch.Tensor
    states: torch.Tensor

    @staticmethod
    def nothing(mel_dim: int, evaluations: int, device: str) -> Spoken:
        import torch

        return Spoken(
            mel=torch.empty(0, mel_dim, device=device),
            states=torch.empty(evaluations, 0, mel_dim, device=device),
        )

    def continued(self, mel: torch.Tensor, states: torch.Tensor, *, keep: int) -> Spoken:
        import torch

        seen = torch.cat((self.states, states), dim=1)
        return replace(
            self,
            frames=self.frames + len(mel),
            mel=torch.cat((self.mel, mel)),
            states=seen[:, max(0, seen.shape[1] - keep) :].clone(),
        )

    def heard(self, last: int, *, keep: int) -> Spoken:
        """Frames before `last` have become sound; `keep` before them are kept."""
        start = max(0, last - keep)
        return replace(
            self, sounded=last, mel=self.mel[start - self.mel_start :].clone(), mel_start=start
        )


@dataclass(slots=True, kw_only=True, eq=False)
class SpeechStream(CodecStream):
    """codes (n,) int64 on the device. `drawn` (m, mel_dim) is noise from frame `drawn_start` on:
    drawn in order, so that chunks draw what one pass does."""

    settings: SpeechSettings
    chunked: bool
    voice: Voice
    generator: torch.Generator
    spoken: Spoken
    codes: torch.Tensor = field(init=False)
    drawn: torch.Tensor = field(init=False)
    drawn_start: int = 0

    def __post_init__(self) -> None:
        import torch

        self.codes = torch.empty(0, dtype=torch.int64, device=self.spoken.mel.device)
        self.drawn = self.spoken.mel

    def noise(self, first: int, count: int) -> torch.Tensor:
        """(count, mel_dim) for the frames from `first` on; none before it are asked for again."""
        import torch

        kept = self.drawn[first - self.drawn_start :]
        if missing := count - len(kept):
            size = (1, max(0, missing), kept.shape[1])
            more = torch.randn(size, generator=self.generator, device=kept.device)
            kept = torch.cat((kept, more[0]))
        self.drawn, self.drawn_start = kept, first
        return kept[:count]


class Heard:
    """What a call makes of a stream; `commit` makes it the stream's, when all has gone well."""

    def __init__(self, stream: SpeechStream, codes: torch.Tensor) -> None:
        self.stream = stream
        self.codes = codes
        self.spoken = stream.spoken
        self.sound: torch.Tensor = codes.new_empty(0, dtype=stream.spoken.mel.dtype)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Equal for windows that may be computed together."""
        settings = self.stream.settings
        return (
            self.spoken.states.shape,
            self.stream.voice.reference_mel.shape,
            settings.num_steps,
            settings.guidance_scale,
            settings.sway_coefficient,
        )

    def noise(self, count: int) -> torch.Tensor:
        return self.stream.noise(self.spoken.frames, count)

    def commit(self, frames: int) -> None:
        self.stream.codes = self.codes
        self.stream.spoken = self.spoken
        self.stream.frames += frames
