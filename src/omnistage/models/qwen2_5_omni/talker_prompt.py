"""What the talker is told: the whole prompt as the thinker saw it, then the reply, streamed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.ar.mrope import Positions, RopeIndex, plain
from omnistage.ar.prompt import PreparedPrompt
from omnistage.config.checks import suggestion
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.contracts.tensors import host_tensor
from omnistage.models.qwen2_5_omni.pipeline import DEFAULT_VOICE
from omnistage.models.qwen2_5_omni.thinker import (
    PAYLOAD_MEDIA,
    PROMPT_STATES,
    REPLY_STATES,
    SOUND_IN_VIDEO,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from omnistage.contracts.payloads import StageData

LOOKAHEAD = 3
"""Decode step 0 adds the state of the reply's token 2, which comes with its token 3."""
EXTRA_ARGS = ("voice", "speaker")
"""A name of the checkpoint's `spk_dict.pt`, in any case; `speaker` is `transformers`' word."""


@dataclass(slots=True, eq=False)
class Reply:
    """The states (k, embedding_size) of the reply's tokens, in order, as they arrive."""

    states: list[torch.Tensor] = field(default_factory=list)
    complete: bool = False

    def __len__(self) -> int:
        return sum(len(part) for part in self.states)


class TalkerPrompts:
    """Builds talker prompts as `Qwen2_5OmniForConditionalGeneration.generate` does. `config` is the
    checkpoint's `Qwen2_5OmniTalkerConfig`, `bos_ids` the text id that opens speech, by voice; of a
    row `max_codes` are kept. With `opens_speech` positions have three dimensions and codec tokens
    open the speech (see `library`). Needs no device and may run in any thread."""

    def __init__(
        self,
        config: Any,
        rope: RopeIndex,
        bos_ids: dict[str, int],
        *,
        max_codes: int,
        opens_speech: bool,
    ) -> None:
        self.config = config
        self.bos_ids = bos_ids
        self.max_codes = max_codes
        self.opens_speech = opens_speech
        self._rope = rope

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        """From the thinker's first output: field prompt_token_ids and the tensors of
        `ThinkerModel.prompt_payload`. Raises `InvalidRequestError` for an unknown voice and for
        more codes than are kept."""
        self._check(params)
        tensors = {name: host_tensor(value).torch() for name, value in data.tensors.items()}
        states = tensors[PROMPT_STATES]
        media: dict[str, Any] = {name: tensors[name] for name in PAYLOAD_MEDIA if name in tensors}
        media[SOUND_IN_VIDEO] = bool(tensors[SOUND_IN_VIDEO].any())
        positions = self._positions(data.fields["prompt_token_ids"], media)
        return self._prompt(states, positions, self.voice(params.extra_args), _first(tensors))

    def probe(self, length: int) -> PreparedPrompt:
        """A prompt of `length` positions without a word, in the default voice."""
        import torch

        told = max(1, length - 2)
        states = torch.randn(
            told, self.config.embedding_size, generator=torch.Generator().manual_seed(told)
        )
        positions = self._positions([self.config.tts_text_pad_token_id] * told, {})
        return self._prompt(states, positions, self.voice({}), [])

    def _positions(self, prompt_ids: list[int], media: dict[str, Any]) -> Positions:
        """What follows the prompt is text, whatever the reply's first token is."""
        ids = [*prompt_ids, *[self.config.tts_text_pad_token_id] * 2]
        return self._rope.positions(ids, media) if self.opens_speech else plain(len(ids))

    def _prompt(
        self, states: torch.Tensor, positions: Positions, voice: str, first: Sequence[torch.Tensor]
    ) -> PreparedPrompt:
        config = self.config
        codec_ids = [config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
        return PreparedPrompt(
            token_ids=[config.tts_codec_mask_token_id] * len(states) + codec_ids,
            cacheable=False,
            conditioning_offset=LOOKAHEAD,
            own={
                "positions": positions,
                "prompt_states": states,
                "bos_id": self.bos_ids[voice],
                "voice_place": list(self.bos_ids).index(voice),
                "reply": Reply(states=list(first)),
            },
        )

    def _check(self, params: OmniTokenSamplingParams) -> None:
        if params.max_tokens is not None and params.max_tokens > self.max_codes:
            raise InvalidRequestError(
                f"max_tokens of the talker is {params.max_tokens}; at most {self.max_codes} are "
                "made, or set more as option max_codes of its model",
                param="max_tokens",
            )
        for name in params.extra_args:
            if name not in EXTRA_ARGS:
                raise InvalidRequestError(
                    f"the talker has no option {name!r}; {suggestion(name, EXTRA_ARGS)}",
                    param="extra_args",
                )

    def voice(self, extra_args: dict[str, Any]) -> str:
        """The checkpoint's spelling. Raises `InvalidRequestError` for a voice that it lacks."""
        by_lower_case = {name.lower(): name for name in self.bos_ids}
        default = DEFAULT_VOICE if DEFAULT_VOICE in self.bos_ids else next(iter(self.bos_ids))
        given = (extra_args.get(name) for name in EXTRA_ARGS)
        asked = str(next((name for name in given if name), default)).lower()
        if asked not in by_lower_case:
            raise InvalidRequestError(
                f"voice {asked!r} is none of {', '.join(sorted(self.bos_ids))}", param="voice"
            )
        return by_lower_case[asked]


def _first(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """States of the reply that came with the prompt's."""
    return [tensors[REPLY_STATES]] if REPLY_STATES in tensors else []
