"""A request as the engine holds it: identity, inputs with their modality, parameters per stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import SamplingParams


class OmniPrompt(TypedDict, total=False):
    """The dictionary form of a prompt: one of `prompt`, `prompt_token_ids` and `messages`.

    `multi_modal_data` maps "image", "audio" or "video" to one item or a list: images are
    `PIL.Image.Image` or uint8 arrays of shape (height, width, 3 or 4), sounds float arrays (n,) or
    `(samples, rate)`, videos uint8 (frames, height, width, 3). `messages` go through the model's
    chat template with `tools`, `chat_template_kwargs`, `add_generation_prompt` and
    `continue_final_message`; a part of theirs is `{"type": "text", "text": …}`, or
    `{"type": "image", "image": item}` and the like. `modalities` names the wanted outputs.
    """

    prompt: str
    negative_prompt: str
    prompt_token_ids: list[int]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    modalities: list[str]


PromptLike = str | OmniPrompt | list[dict[str, Any]]
"""A text, a dictionary, or chat messages."""


@dataclass(slots=True, kw_only=True)
class OmniRequest:
    """One admitted request.

    `inputs` is the first payload of the entry stage, `sampling_params` has one entry a stage in
    stage order. With `streaming_input` more payloads follow (`append_input`) until `end_input`.
    `num_children` asks for independent children (`n` of a token pipeline), merged in child order.
    """

    identity: RequestIdentity
    inputs: StageData
    sampling_params: tuple[SamplingParams, ...]
    output_modalities: frozenset[Modality] | None = None
    streaming_input: bool = False
    num_children: int = 1
    prompt: Any = None
