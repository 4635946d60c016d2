"""Prompts with media: chat template, placeholders of media expanded, positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage.ar.media_inputs import (
    KINDS,
    Media,
    MediaLimits,
    PreparedCache,
    media_order,
    request_media,
)
from omnistage.ar.media_processing import ROPE, TENSORS, MediaProcessor, ProcessedMedia
from omnistage.ar.prompt import MediaItem, PreparedPrompt
from omnistage.ar.tokenizer import (
    MESSAGES,
    PROMPT_TOKEN_IDS,
    chat_text,
    check_length,
    checked_ids,
    encode,
    text_source,
)
from omnistage.config.checks import suggestion
from omnistage.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from omnistage.ar.mrope import RopeIndex
    from omnistage.contracts.payloads import StageData
    from omnistage.contracts.sampling import OmniTokenSamplingParams

SOUND_IN_VIDEO = "use_audio_in_video"
PROCESSOR_OPTIONS = (SOUND_IN_VIDEO,)
PROBED_IDS = 200
"""Below them no tokenizer of the family has special tokens."""


class MediaPrompts:
    """`config` is that of a language model with encoders (a thinker's), `processor` the
    checkpoint's, `rope` computes positions. Needs no device and may run in any thread."""

    def __init__(
        self,
        config: Any,
        processor: Any,
        rope: RopeIndex,
        *,
        max_model_len: int,
        limits: MediaLimits | None = None,
    ) -> None:
        self.tokenizer = processor.tokenizer
        self._processor = MediaProcessor(processor, PreparedCache())
        self._renderer = processor if processor.chat_template else processor.tokenizer
        self._vocab_size: int = config.text_config.vocab_size
        self._limits = limits or MediaLimits()
        self._max_model_len = max_model_len
        self._rope = rope
        self._kinds = {
            config.image_token_id: "image",
            config.audio_token_id: "audio",
            config.video_token_id: "video",
        }

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        """Raises `InvalidRequestError` for media that the prompt has no place for, or the other way
        round, for media over a limit, and for a prompt that is too long."""
        media = request_media(data, self._limits)
        ids = self._token_ids(data)
        with_sound = self._sound_in_video(data)
        order = media_order(data.fields[MESSAGES]) if text_source(data) == MESSAGES else None
        placed = list(self._placed(ids, media, order, with_sound))
        expanded, items, rope = self._expand(ids, placed)
        check_length(len(expanded), self._max_model_len, param=text_source(data))
        if with_sound:
            rope[SOUND_IN_VIDEO] = True
        where = np.flatnonzero(np.isin(np.asarray(expanded), list(self._kinds)))
        return PreparedPrompt(
            token_ids=expanded,
            media=tuple(items),
            own={
                "positions": self._rope.positions(expanded, rope),
                "media": rope,
                "media_places": where if items else where[:0],
            },
        )

    def probe(self, length: int) -> PreparedPrompt:
        """Any text of `length` ids."""
        ids = [place * 31 % PROBED_IDS for place in range(length)]
        own = {
            "positions": self._rope.positions(ids, {}),
            "media": {},
            "media_places": np.zeros(0, np.int64),
        }
        return PreparedPrompt(token_ids=ids, own=own)

    def _token_ids(self, data: StageData) -> list[int]:
        source = text_source(data)
        if source == PROMPT_TOKEN_IDS:
            return checked_ids(data.fields[source], self._vocab_size)
        if source == MESSAGES:
            text = chat_text(data, self._renderer)
            return encode(self.tokenizer, text, False, self._max_model_len)
        special = data.fields.get("add_special_tokens", True)
        return encode(self.tokenizer, data.fields[source], special, self._max_model_len)

    def _sound_in_video(self, data: StageData) -> bool:
        options = data.fields.get("mm_processor_kwargs") or {}
        for name in options:
            if name not in PROCESSOR_OPTIONS:
                raise InvalidRequestError(
                    f"mm_processor_kwargs: {name!r} is not taken; "
                    f"{suggestion(name, PROCESSOR_OPTIONS)}",
                    param="mm_processor_kwargs",
                )
        return bool(options.get(SOUND_IN_VIDEO, False))

    def _placed(
        self,
        ids: list[int],
        media: dict[str, list[Media]],
        order: list[tuple[str, int]] | None,
        with_sound: bool,
    ) -> Iterator[tuple[int, Media]]:
        """(place of its placeholder in `ids`, item) in order. Sounds that no placeholder stands for
        belong to the videos, in order, where videos have sound."""
        places = {
            kind: [place for place, token in enumerate(ids) if self._kinds.get(token) == kind]
            for kind in KINDS
        }
        named = _named(media, order)
        if with_sound:
            named = _with_sounds(named, media, order, len(places["audio"]))
        for kind in KINDS:
            if len(places[kind]) != len(named[kind]):
                raise InvalidRequestError(
                    f"the prompt has {len(places[kind])} placeholders for {kind} "
                    f"({self._processor.placeholder(kind)}), and {len(named[kind])} items of it "
                    "are given; there must be one for each",
                    param="prompt",
                )
        pairs = [pair for kind in KINDS for pair in zip(places[kind], named[kind], strict=True)]
        yield from sorted(pairs, key=lambda pair: pair[0])

    def _expand(
        self, ids: list[int], placed: list[tuple[int, Media]]
    ) -> tuple[list[int], list[MediaItem], dict[str, Any]]:
        """Token ids with placeholders expanded, media items, and what positions follow from."""
        import torch

        expanded: list[int] = []
        items: list[MediaItem] = []
        rope: dict[str, list[torch.Tensor]] = {}
        done = 0
        for place, media in placed:
            expanded += ids[done:place]
            digest = self._processor.digest(media)
            processed = self._processor.process(media, digest)
            items += self._items(media, digest, processed, len(expanded))
            expanded += processed.token_ids
            done = place + 1
            for name in ROPE:
                if name in processed.tensors:
                    rope.setdefault(name, []).append(processed.tensors[name])
        expanded += ids[done:]
        return expanded, items, {name: torch.cat(parts) for name, parts in rope.items()}

    def _items(
        self, media: Media, digest: bytes, processed: ProcessedMedia, first: int
    ) -> Iterator[MediaItem]:
        """The item, and the sound of a video as one of its own."""
        kinds = [media.kind] + (["audio"] if media.sound is not None else [])
        token_kinds = [self._kinds.get(token) for token in processed.token_ids]
        for kind in kinds:
            yield MediaItem(
                kind=kind,
                digest=digest + kind.encode(),
                spans=tuple(_runs(token_kinds, kind, first)),
                tensors={name: processed.tensors[name] for name in TENSORS[kind]},
            )


def _named(
    media: dict[str, list[Media]], order: list[tuple[str, int]] | None
) -> dict[str, list[Media]]:
    """By kind, in the order in which the prompt names them: that of its messages, else by index."""
    if order is None:
        return dict(media)
    named: dict[str, list[Media]] = {kind: [] for kind in KINDS}
    for kind, index in order:
        if not 0 <= index < len(media[kind]):
            raise InvalidRequestError(
                f"a message names {kind} {index}; {len(media[kind])} are given", param="messages"
            )
        named[kind].append(media[kind][index])
    return named


def _with_sounds(
    named: dict[str, list[Media]],
    media: dict[str, list[Media]],
    order: list[tuple[str, int]] | None,
    num_audio_places: int,
) -> dict[str, list[Media]]:
    if order is None:
        spoken, spare = named["audio"][:num_audio_places], named["audio"][num_audio_places:]
    else:
        spoken = named["audio"]
        spare = [one for one in media["audio"] if one not in spoken]
    sounds = iter(spare)
    videos = []
    for video in named["video"]:
        sound = video.sound or next(sounds, None)
        if sound is None:
            raise InvalidRequestError(
                f"{SOUND_IN_VIDEO} is set, but {video.name} has no sound; give one sound for each "
                "video, or leave it out",
                param="mm_processor_kwargs",
            )
        videos.append(replace(video, sound=sound))
    return {**named, "audio": spoken, "video": videos}


def _runs(kinds: list[str | None], kind: str, first: int) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of `kind`, counted from `first`."""
    start = None
    for place, found in enumerate([*kinds, None]):
        if found == kind and start is None:
            start = place
        elif found != kind and start is not None:
            yield first + start, first + place
            start = None
