"""What a caller may pass as a prompt, and the first payload that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.requests import PromptLike
from omnistage.engine.conversations import is_conversation, read_conversation
from omnistage.engine.media import MEDIA_KINDS, media_inputs

MODALITIES = "modalities"
_TEXTS = ("prompt", "negative_prompt")
_SOURCES = ("prompt", "prompt_token_ids", "messages")
_OPTIONS: dict[str, type] = {
    "tools": list,
    "chat_template_kwargs": dict,
    "mm_processor_kwargs": dict,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "add_special_tokens": bool,
}
_KEYS = (*_TEXTS, "prompt_token_ids", "messages", *_OPTIONS, "multi_modal_data", MODALITIES)
_PICTURE_KINDS = ("image", "mask")


def prompt_data(prompt: PromptLike) -> StageData:
    """A prompt as the first payload.

    Fields: "prompt" and "negative_prompt", or "prompt_token_ids", or "messages" (media in them as
    `{"type": kind, "index": i}`), and the options beside them. Tensors: "image_0" … and "mask_0" …
    uint8 (height, width, channels), "audio_0" …, "video_0" … as `engine.media` has them.
    Raises `InvalidRequestError` that names the key.
    """
    given = as_dictionary(prompt)
    _known(given, _KEYS, "prompt key")
    sources = [key for key in _SOURCES if given.get(key) is not None]
    if len(sources) > 1:
        raise InvalidRequestError(
            f"{' and '.join(sources)} are both prompts; give one", param=sources[1]
        )
    media = dict(given.get("multi_modal_data") or {})
    _known(media, (*_PICTURE_KINDS, *MEDIA_KINDS), "multi_modal_data key")
    fields = _texts(given) | _token_ids(given) | _options(given)
    if given.get("messages") is not None:
        fields["messages"], media = read_conversation(given["messages"], media)
    tensors, about = _media(media)
    return StageData(modality=_modality(media), fields=fields | about, tensors=tensors)


def as_dictionary(prompt: PromptLike) -> dict[str, Any]:
    """A text, a list of messages or a dictionary as a dictionary."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if is_conversation(prompt):
        return {"messages": prompt}
    if not isinstance(prompt, dict):
        raise InvalidRequestError(
            "a prompt is a string, a dictionary or a list of messages, not "
            f"{type(prompt).__name__}",
            param="prompt",
        )
    return dict(prompt)


def _texts(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: given[key] for key in _TEXTS if given.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{key} must be a string", param=key)
    return found


def _token_ids(given: Mapping[str, Any]) -> dict[str, Any]:
    ids = given.get("prompt_token_ids")
    if ids is None:
        return {}
    is_list = isinstance(ids, list | tuple | np.ndarray)
    plain = [int(token) for token in ids if _is_token(token)] if is_list else []
    if not plain or len(plain) != len(ids):
        raise InvalidRequestError(
            "prompt_token_ids must be a list of token ids, whole numbers from 0, at least one",
            param="prompt_token_ids",
        )
    return {"prompt_token_ids": plain}


def _is_token(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: given[key] for key in _OPTIONS if given.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, _OPTIONS[key]):
            raise InvalidRequestError(
                f"{key} must be of type {_OPTIONS[key].__name__}, got {type(value).__name__}",
                param=key,
            )
    return found


def _media(media: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and fields of all kinds."""
    tensors: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for kind, value in media.items():
        if kind in MEDIA_KINDS:
            found, about = media_inputs(kind, value)
            tensors |= found
            fields |= about
        else:
            items = value if isinstance(value, list | tuple) else [value]
            tensors |= {f"{kind}_{i}": _pixels(item, kind) for i, item in enumerate(items)}
    return tensors, fields


def _modality(media: Mapping[str, Any]) -> Modality:
    for kind in ("image", "video", "audio"):
        if kind in media:
            return Modality(kind)
    return Modality.IMAGE if media else Modality.TEXT


def _known(given: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    for key in given:
        if key not in allowed:
            raise InvalidRequestError(
                f"unknown {what} {key!r}; {suggestion(str(key), allowed)}", param=str(key)
            )


def _pixels(item: Any, kind: str) -> np.ndarray:
    """A PIL image or an array as uint8 (height, width, channels); a mask may have one channel."""
    if not isinstance(item, np.ndarray):
        if not hasattr(item, "convert"):
            raise InvalidRequestError(
                f"{kind} must be a PIL image or a uint8 array, not {type(item).__name__}",
                param=kind,
            )
        if kind == "mask":
            item = item.convert("L")
        elif item.mode not in ("RGB", "RGBA"):
            item = item.convert("RGB")
        item = np.asarray(item)
    if item.ndim == 2:
        item = item[:, :, None]
    if item.dtype != np.uint8 or item.ndim != 3 or item.shape[2] not in (1, 3, 4):
        raise InvalidRequestError(
            f"{kind} must be uint8 of shape (height, width, 1, 3 or 4), got {item.dtype} "
            f"{item.shape}",
            param=kind,
        )
    return np.ascontiguousarray(item)
