"""The unmodified `Qwen2_5OmniForConditionalGeneration.generate`, and requests to compare it on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.checkpoints import checkpoint

CHECKPOINT = "qwen2.5-omni"
MAX_TOKENS = 10
MAX_CODES = 40
SEED = 7
ODD_FPS = 1.7
"""Positions of a video are rounded at it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A user's message, with media by kind and index."""

    parts: tuple[Any, ...]
    sound_in_video: bool = False

    def order(self, kind: str) -> list[int]:
        return [part[1] for part in self.parts if not isinstance(part, str) and part[0] == kind]


CASES = {
    "text": Case(parts=("describe the flower cat",)),
    "image": Case(parts=(("image", 0), "describe the cat")),
    "audio": Case(parts=("the ", ("audio", 0), "describe")),
    "image and audio": Case(parts=(("image", 0), ("audio", 0), "describe")),
    "media in another order": Case(
        parts=(("audio", 0), "a", ("image", 1), ("image", 0), "describe")
    ),
    "video": Case(parts=(("video", 0), "describe")),
    "video with sound": Case(parts=(("video", 0), "describe"), sound_in_video=True),
    "everything": Case(parts=(("image", 0), "a", ("video", 0), "b", ("audio", 0), "describe")),
}


@cache
def media(kind: str, index: int) -> Any:
    """Noise, seeded."""
    import numpy as np

    noise = np.random.default_rng((len(kind), index))
    if kind == "audio":
        return (0.3 * noise.standard_normal(32_345 + 1000 * index)).astype(np.float32)
    shape = (6, 64, 96, 3) if kind == "video" else (70 + 8 * index, 90, 3)
    return noise.integers(0, 256, shape, dtype=np.uint8)


def messages(case: Case) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": part[0], "index": part[1]}
        for part in case.parts
    ]
    return [
        {"role": "system", "content": "the robot"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "house"},
        {"role": "user", "content": "and the dog"},
    ]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """prompt_ids and text_ids of the thinker; codes (n,); waveform (samples,) from `SEED`."""

    prompt_ids: list[int]
    text_ids: list[int]
    codes: Any
    waveform: Any


@cache
def processor() -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(checkpoint(CHECKPOINT))


@cache
def model() -> Any:
    import torch
    from transformers import Qwen2_5OmniForConditionalGeneration

    return Qwen2_5OmniForConditionalGeneration.from_pretrained(
        checkpoint(CHECKPOINT), dtype=torch.float32
    ).eval()


def processed(case: Case) -> Any:
    """What the processor makes of the whole prompt in one call."""
    import torch

    text = processor().apply_chat_template(
        messages(case), add_generation_prompt=True, tokenize=False
    )
    given = {
        kind: [media(kind, i) for i in case.order(kind)] for kind in ("image", "audio", "video")
    }
    arguments: dict[str, Any] = {
        name: given[kind]
        for kind, name in (("image", "images"), ("audio", "audio"), ("video", "videos"))
        if given[kind]
    }
    if given["video"]:
        arguments["videos_kwargs"] = {"fps": ODD_FPS, "do_sample_frames": False}
    if case.sound_in_video:
        arguments["audio"] = [media("audio", 0)]
        arguments |= sound_in_video()
    inputs = processor()(text=[text], return_tensors="pt", **arguments)
    if given["video"]:
        inputs["video_second_per_grid"] = torch.as_tensor(inputs["video_second_per_grid"])
    return inputs


def sound_in_video() -> dict[str, Any]:
    if hasattr(processor(), "load_audio_from_video"):
        return {"load_audio_from_video": True, "audio_from_video_indices": [0]}
    return {"use_audio_in_video": True}


def end_ids() -> list[int]:
    config = model().config.talker_config
    return [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]


def _for_thinker_alone(inputs: Any) -> dict[str, Any]:
    """`generate` hands a picture to the talker too, which refuses it, unless its name has the
    thinker's prefix."""
    renamed = dict(inputs)
    for name in ("pixel_values", "pixel_values_videos"):
        if name in renamed:
            renamed[f"thinker_{name}"] = renamed.pop(name)
    return renamed


def _padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """One position of padding on the left."""
    import torch

    pad = {"input_ids": model().config.thinker_config.text_config.pad_token_id}
    padding = {"attention_mask": 0} | pad
    return inputs | {
        name: torch.nn.functional.pad(inputs[name], (1, 0), value=value)
        for name, value in padding.items()
    }


@cache
def expected(name: str, speaker: str = "Chelsie", *, padded: bool = False) -> Expected:
    """Greedy, without ends of the thinker."""
    import torch

    case, inputs, whole = CASES[name], processed(CASES[name]), model()
    prompt_ids = inputs["input_ids"][0].tolist()
    given = _for_thinker_alone(inputs)
    if padded:
        given = _padded(given)
    length = given["input_ids"].shape[1]
    talked = []
    generate = whole.talker.generate
    whole.talker.generate = lambda *args, **kwargs: (
        talked.append(generate(*args, **kwargs)) or (talked[-1])
    )
    torch.manual_seed(SEED)
    try:
        sequences, waveform = whole.generate(
            **given,
            speaker=speaker,
            use_audio_in_video=case.sound_in_video,
            thinker_max_new_tokens=MAX_TOKENS,
            thinker_eos_token_id=None,
            thinker_do_sample=False,
            talker_max_new_tokens=MAX_CODES,
            talker_eos_token_id=end_ids(),
            talker_do_sample=False,
        )
    finally:
        del whole.talker.generate
    codes = talked[0][0, length + 2 :]
    codes = codes[[code not in end_ids() for code in codes.tolist()]]
    return Expected(
        prompt_ids=prompt_ids,
        text_ids=sequences[0, length:].tolist(),
        codes=codes,
        waveform=waveform,
    )
