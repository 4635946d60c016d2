"""What the talker is told: the thinker's user turns, then the answer, streamed behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.ar.prompt import PreparedPrompt
from omnistage.config.checks import suggestion
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.contracts.tensors import host_tensor
from omnistage.models.qwen3_omni.pipeline import DEFAULT_VOICE
from omnistage.models.qwen3_omni.rope import rope_index
from omnistage.models.qwen3_omni.thinker import PAYLOAD_MEDIA, TALKER_STATE

if TYPE_CHECKING:
    import torch

    from omnistage.contracts.payloads import StageData

HEADER = 3
"""Tokens that open the answer's turn: start, role, line break."""
PADS = 4
"""Positions between the header and the answer that carry only codec tokens."""
LOOKAHEAD = 3
"""Answer ids that decode step 0 waits for: the prompt's, its own, and one that shows that its own
is not the last."""
EXTRA_ARGS = ("voice", "speaker")
"""A name of the checkpoint's `speaker_id`, in any case; transformers calls it `speaker`."""


@dataclass(slots=True, eq=False)
class AnswerText:
    """The answer's ids as they arrive: `tail` are those of the prompt behind the header,
    `generated` the thinker's. The first of them all stands in the talker's prompt; decode step k
    adds number k + 1, and the end mark after the last but one: the thinker's last token is its end,
    and one that a limit cut off is not spoken by `transformers` either."""

    tail: list[int]
    generated: list[int] = field(default_factory=list)
    complete: bool = False

    def trailing(self, first: int, end_id: int) -> list[int]:
        """The ids for decode steps from `first` on, as far as they are known."""
        known = (self.tail + self.generated)[1:]
        if self.complete:
            known = [*(self.tail + self.generated[:-1])[1:], end_id]
        return known[first:]


class TalkerPrompts:
    """Builds talker prompts as `Qwen3OmniMoeForConditionalGeneration.generate` does; needs only the
    checkpoint's `Qwen3OmniMoeConfig`, no device, and may run in any thread."""

    def __init__(self, config: Any, thinker_eos_ids: frozenset[int]) -> None:
        self.config = config
        self.talker = config.talker_config
        self.thinker_eos_ids = thinker_eos_ids
        thinker = config.thinker_config
        self.media_ids = frozenset(
            (thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id)
        )
        self._rope = rope_index(self.talker, thinker.audio_config, self.talker.spatial_merge_size)
        self.speakers: dict[str, int] = dict(self.talker.speaker_id or {})

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        """From the thinker's first output: fields prompt_token_ids and token_ids, and the tensors
        of `ThinkerModel.prompt_payload`. Raises `InvalidRequestError` for an unknown speaker and
        for a prompt without an answer to speak."""
        prompt_ids = list(data.fields["prompt_token_ids"])
        turn = self._answer_turn(prompt_ids)
        text = AnswerText(prompt_ids[turn + HEADER :], list(data.fields["token_ids"]))
        users = self._user_places(prompt_ids)
        text_ids = [prompt_ids[place] for place in users] + self._opening(prompt_ids, turn, text)
        token_ids = text_ids[: len(users)] + [self.config.tts_pad_token_id] * (HEADER + PADS + 2)
        tensors = {name: host_tensor(value).torch() for name, value in data.tensors.items()}
        media = {name: tensors[name] for name in PAYLOAD_MEDIA if name in tensors}
        positions = self._rope.positions(token_ids, media)
        return PreparedPrompt(
            token_ids=token_ids,
            cacheable=False,
            penalized=False,
            conditioning_offset=LOOKAHEAD - len(text.tail),
            own={
                "positions": positions,
                "text": text,
                "text_ids": text_ids,
                "codec_ids": self._codec_ids(params),
                **self._media_of(prompt_ids, users, tensors),
            },
        )

    def probe(self, length: int, num_text_ids: int) -> PreparedPrompt:
        """Any text of `length` ids, spoken by the default speaker."""
        codec_ids = self._codec_ids(OmniTokenSamplingParams())
        ids = [place * 31 % num_text_ids for place in range(max(length, len(codec_ids)))]
        return PreparedPrompt(
            token_ids=ids,
            cacheable=False,
            own={
                "positions": self._rope.positions(ids, {}),
                "text": AnswerText([], [0]),
                "text_ids": ids,
                "codec_ids": codec_ids,
            },
        )

    def _answer_turn(self, prompt_ids: list[int]) -> int:
        """Where the last turn of the assistant starts."""
        opening = (self.config.im_start_token_id, self.config.assistant_token_id)
        for place in range(len(prompt_ids) - HEADER, -1, -1):
            if tuple(prompt_ids[place : place + 2]) == opening:
                return place
        raise InvalidRequestError(
            "speech needs a prompt that opens the assistant's turn: send chat messages, or end the "
            "prompt as the model's chat template does",
            param="prompt",
        )

    def _user_places(self, prompt_ids: list[int]) -> list[int]:
        """Positions whose turn is a user's, its opening and end included."""
        places, role = [], None
        for place, token in enumerate(prompt_ids):
            if token == self.config.im_start_token_id or place == 0:
                role = prompt_ids[min(place + 1, len(prompt_ids) - 1)]
            if role == self.config.user_token_id:
                places.append(place)
        return places

    def _opening(self, prompt_ids: list[int], turn: int, text: AnswerText) -> list[int]:
        """Text ids of the talker's last positions: header, pads, begin mark, first of the answer.
        An answer without a word is an end mark."""
        config = self.config
        first = (text.tail + text.generated)[0]
        if not text.tail and first in self.thinker_eos_ids:
            first = config.tts_eos_token_id
        header = prompt_ids[turn : turn + HEADER]
        return [*header, *[config.tts_pad_token_id] * PADS, config.tts_bos_token_id, first]

    def _codec_ids(self, params: OmniTokenSamplingParams) -> list[int]:
        """Codec tokens added to the prompt's last positions."""
        talker = self.talker
        return [
            talker.codec_nothink_id,
            talker.codec_think_bos_id,
            talker.codec_think_eos_id,
            self.speakers[self.speaker(params)],
            talker.codec_pad_id,
            talker.codec_bos_id,
        ]

    def speaker(self, params: OmniTokenSamplingParams) -> str:
        for name in params.extra_args:
            if name not in EXTRA_ARGS:
                raise InvalidRequestError(
                    f"the talker has no option {name!r}; {suggestion(name, EXTRA_ARGS)}",
                    param="extra_args",
                )
        default = DEFAULT_VOICE if DEFAULT_VOICE in self.speakers else next(iter(self.speakers))
        given = (params.extra_args.get(name) for name in EXTRA_ARGS)
        asked = next((name for name in given if name), default)
        if str(asked).lower() not in self.speakers:
            raise InvalidRequestError(
                f"voice {asked!r} is none of {', '.join(sorted(self.speakers))}", param="voice"
            )
        return str(asked).lower()

    def _media_of(
        self, prompt_ids: list[int], users: list[int], tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Which talker positions take which of the thinker's states (n, thinker_hidden_size)."""
        import torch

        order = [p for p, token in enumerate(prompt_ids) if token in self.media_ids]
        rank = {place: number for number, place in enumerate(order)}
        pairs = [(at, rank[place]) for at, place in enumerate(users) if place in rank]
        if not pairs:
            return {}
        places, ranks = zip(*pairs, strict=True)
        return {
            "media_places": torch.tensor(places),
            "media_states": tensors[TALKER_STATE][list(ranks)],
        }
