"""The unmodified `Qwen3OmniMoeForConditionalGeneration.generate`, and requests to compare it on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.checkpoints import checkpoint

CHECKPOINT = "qwen3-omni"
KINDS = ("image", "audio", "video")
MAX_TOKENS = 10
MAX_FRAMES = 20
"""Of the talker: tokens it may make, one more than frames."""
ODD_FPS = 1.7
"""At it, positions of a video lie between whole numbers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A user's message, with media by kind and index."""

    parts: tuple[Any, ...]
    sound_in_video: bool = False

    def order(self, kind: str) -> list[int]:
        return [part[1] for part in self.parts if not isinstance(part, str) and part[0] == kind]

    @property
    def kinds(self) -> set[str]:
        return {part[0] for part in self.parts if not isinstance(part, str)}


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
    """prompt_ids and text_ids of the thinker; codes (frames, groups); waveform (samples,) of one
    pass over them."""

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
    """Pictures with sound need `audio_config` in the talker's configuration, which lacks it."""
    import torch
    from transformers import Qwen3OmniMoeForConditionalGeneration

    found = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        checkpoint(CHECKPOINT), dtype=torch.float32
    ).eval()
    found.talker.config.audio_config = found.config.thinker_config.audio_config
    return found


def processed(case: Case) -> Any:
    """What the processor makes of the whole prompt in one call."""
    import torch

    text = processor().apply_chat_template(
        messages(case), add_generation_prompt=True, tokenize=False
    )
    given = {kind: [media(kind, i) for i in case.order(kind)] for kind in KINDS}
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


@cache
def expected(name: str, speaker: str = "ethan") -> Expected:
    case = CASES[name]
    return generated(processed(case), speaker, case.sound_in_video)


def prompt_inputs(token_ids: list[int]) -> dict[str, Any]:
    """What `generate` takes, of text alone."""
    import torch

    ids = torch.tensor([token_ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(
    inputs: Any,
    speaker: str = "ethan",
    sound_in_video: bool = False,
    repetition_penalty: float = 1.0,
) -> Expected:
    """Greedy, without ends: the thinker's is ignored, the talker's cannot be."""
    import torch

    whole = model()
    talked = []
    generate = whole.talker.generate
    whole.talker.generate = lambda *args, **kwargs: (
        talked.append(generate(*args, **kwargs)) or (talked[-1])
    )
    try:
        sequences, _ = whole.generate(
            **inputs,
            speaker=speaker,
            use_audio_in_video=sound_in_video,
            thinker_max_new_tokens=MAX_TOKENS,
            thinker_eos_token_id=None,
            thinker_do_sample=False,
            talker_max_new_tokens=MAX_FRAMES,
            talker_do_sample=False,
            talker_repetition_penalty=repetition_penalty,
        )
    finally:
        del whole.talker.generate
    frames = [states[-1] for states in talked[0].hidden_states if states[-1] is not None]
    codes = torch.stack(frames, dim=1)[0]
    prompt_ids = inputs["input_ids"][0].tolist()
    with torch.inference_mode():
        waveform = whole.code2wav(codes.T.unsqueeze(0))[0, 0]
    return Expected(
        prompt_ids=prompt_ids,
        text_ids=sequences[0, len(prompt_ids) :].tolist(),
        codes=codes,
        waveform=waveform,
    )
