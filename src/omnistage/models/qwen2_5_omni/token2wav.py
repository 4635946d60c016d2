"""Qwen2.5-Omni's codec ids → sound: a diffusion transformer makes a mel spectrogram of them, a
vocoder makes that sound.

Two ways, by request (`SpeechSettings.chunked`). The one-pass decode is that of
`Qwen2_5OmniToken2WavModel`, from the same noise for the same seed; it needs all codes. In chunks,
sound leaves as codes come. All of the past is taken into account exactly; of the future only
`lookahead_blocks` are, where one pass lets every block, through its neighbours, depend on all that
follow: chunks deviate from one pass by what that is worth (docs/contracts/models__qwen2_5_omni.md).
Where chunks meet there is no seam: a chunk's spectrogram continues that of the chunk before, and
the vocoder sees enough of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omnistage.ar.generation.codec import CodecStream
from omnistage.contracts.errors import InternalError, InvalidRequestError
from omnistage.contracts.identity import RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.models.qwen2_5_omni.codes import SPEECH, SpeechSettings
from omnistage.models.qwen2_5_omni.spectrum import (
    Velocity,
    blocks_seen_before,
    num_evaluations,
    solve,
)
from omnistage.models.qwen2_5_omni.speech_stream import Heard, SpeechStream, Spoken
from omnistage.models.qwen2_5_omni.token2wav_options import Token2WavOptions
from omnistage.models.qwen2_5_omni.vocoder import reach_frames
from omnistage.models.qwen2_5_omni.voices import Voice

if TYPE_CHECKING:
    import torch


SAMPLE_RATE = 24_000
"""Hz; no configuration of the checkpoint says it."""


class Token2Wav:
    """A `CodecModel`. `module` is a `Qwen2_5OmniToken2WavModel` in float32, which runs unmodified.

    `end_ids` are talker ids that end a stream and are no codes. State of a stream of the released
    model in chunks: 36 evaluations of 48 frames of 80 numbers, 0.6 MB, and its codes.
    """

    sample_rate = SAMPLE_RATE
    num_codebooks = 1
    captured_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        module: Any,
        voices: Sequence[Voice],
        options: Token2WavOptions,
        *,
        vocab_size: int,
        end_ids: frozenset[int],
        device: str,
        max_streams: int,
    ) -> None:
        dit, vocoder = module.code2wav_dit_model, module.code2wav_bigvgan_model
        self.module = module
        self.codebook_size = vocab_size
        self.max_streams = max_streams
        self.between: Callable[[], None] = lambda: None
        self._hop = 1
        for stride in vocoder.config.upsample_rates:
            self._hop *= stride
        self.samples_per_frame = self._hop * dit.repeats
        self._dit, self._vocoder = dit, vocoder
        self._voices = voices
        self._options = options
        self._end_ids = end_ids
        self._device = device
        self.vocoder_reach = min(reach_frames(vocoder), options.vocoder_context_frames)
        self._past = blocks_seen_before(dit.config) * dit.block_size
        self._chunk = options.chunk_blocks * dit.block_size
        self._ahead = options.lookahead_blocks * dit.block_size

    def begin(self, key: RequestKey) -> CodecStream:
        raise InternalError("token2wav needs a voice and a seed to begin")

    def begin_with(self, key: RequestKey, start: StageData) -> SpeechStream:
        import torch

        settings: SpeechSettings = start.fields[SPEECH]
        generator = torch.Generator(self._device).manual_seed(settings.seed)
        return SpeechStream(
            key=key,
            row=0,
            settings=settings,
            chunked=self._is_chunked(settings),
            voice=self._voices[settings.voice].on(self._device),
            generator=generator,
            spoken=Spoken.nothing(self._dit.mel_dim, num_evaluations(settings), self._device),
        )

    def _is_chunked(self, settings: SpeechSettings) -> bool:
        if settings.chunked is not None:
            return settings.chunked
        return settings.streamed if self._options.chunked is None else self._options.chunked

    def decode(
        self, streams: Sequence[CodecStream], codes: torch.Tensor, frames: Sequence[int]
    ) -> list[torch.Tensor]:
        """Of a stream that is decoded in one pass, nothing yet."""
        import torch

        heard = []
        for stream, ids, count in zip(streams, codes, frames, strict=True):
            assert isinstance(stream, SpeechStream)
            more = self._without_end(ids[:count, 0])
            heard.append(Heard(stream, torch.cat((stream.codes.to(more.device), more))))
        with torch.inference_mode():
            for window in iter(lambda: self._ready(heard), []):
                self._advance(window, self._chunk, self._ahead)
            for one in heard:
                self._sound(one, whole=False)
        for one, count in zip(heard, frames, strict=True):
            one.commit(count)
        return [one.sound for one in heard]

    def finish(self, stream: CodecStream) -> torch.Tensor:
        import torch

        assert isinstance(stream, SpeechStream)
        one = Heard(stream, stream.codes)
        rest = self._num_frames(one) - one.spoken.frames
        if rest > self._dit.config.max_position_embeddings:
            raise InvalidRequestError(
                f"speech of {rest} mel frames; at most "
                f"{self._dit.config.max_position_embeddings} are decoded in one pass",
                param="max_tokens",
            )
        with torch.inference_mode():
            if rest:
                self._advance([one], rest, 0)
            self._sound(one, whole=True)
        one.commit(0)
        return one.sound

    def release(self, stream: CodecStream) -> None:
        """What it holds goes with it."""

    def describe(self) -> dict[str, Any]:
        return {
            "codec": type(self.module).__name__,
            "sample_rate": self.sample_rate,
            "samples_per_frame": self.samples_per_frame,
            "chunk_frames": self._chunk // self._dit.repeats,
            "lookahead_frames": self._ahead // self._dit.repeats,
            "vocoder_context_frames": self.vocoder_reach,
            "max_streams": self.max_streams,
        }

    def close(self) -> None:
        """It holds nothing but its module."""

    def _without_end(self, ids: torch.Tensor) -> torch.Tensor:
        """An end is the last of its stream."""
        import torch

        return ids[~torch.isin(ids, torch.tensor(sorted(self._end_ids), device=ids.device))]

    def _num_frames(self, one: Heard) -> int:
        return len(one.codes) * int(self._dit.repeats)

    def _ready(self, heard: list[Heard]) -> list[Heard]:
        """Those whose next chunk can be made, of one shape."""
        need = self._chunk + self._ahead
        ready = [
            one
            for one in heard
            if one.stream.chunked and self._num_frames(one) - one.spoken.frames >= need
        ]
        return [one for one in ready if one.shape == ready[0].shape]

    def _advance(self, windows: list[Heard], frames: int, ahead: int) -> None:
        """Continue the spectrograms of `windows`, which are of one shape, by `frames`."""
        import torch

        settings, repeats = windows[0].stream.settings, self._dit.repeats
        first = windows[0].spoken
        past = first.states.shape[1]
        noise = torch.stack([one.noise(frames + ahead) for one in windows])
        codes = torch.stack(
            [
                one.codes[(one.spoken.frames - past) // repeats :][
                    : (past + frames + ahead) // repeats
                ]
                for one in windows
            ]
        )
        velocity = Velocity(
            self._dit,
            codes.to(self._device),
            torch.cat([one.stream.voice.condition for one in windows]),
            torch.cat([one.stream.voice.reference_mel for one in windows]),
            torch.stack([one.spoken.states for one in windows]),
            settings,
            self.between,
        )
        mels, states = solve(velocity, noise, settings)
        for index, one in enumerate(windows):
            one.spoken = one.spoken.continued(
                mels[index, :frames], states[index, :, :frames], keep=self._past
            )

    def _sound(self, one: Heard, *, whole: bool) -> None:
        """Make the frames sound that are all that the vocoder would see."""
        spoken, reach = one.spoken, self.vocoder_reach
        last = spoken.frames if whole else max(spoken.sounded, spoken.frames - reach)
        count = last - spoken.sounded
        if count <= 0:
            return
        before = min(reach, spoken.sounded)
        mel = spoken.mel[spoken.sounded - before - spoken.mel_start :]
        wave = self._vocoder(mel.T.unsqueeze(0)).reshape(-1).to(self._device)
        one.sound = wave[before * self._hop : (before + count) * self._hop]
        one.spoken = spoken.heard(last, keep=reach)
