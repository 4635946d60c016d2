"""Log probabilities in the shapes of the chat and the completion routes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

LOWEST = -9999.0
"""What OpenAI reports for a probability of nothing: JSON has no infinity."""


def finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "token": entry["token"],
        "logprob": finite(entry["logprob"]),
        "bytes": entry["bytes"],
    }


def chat_logprobs(entries: Iterable[dict[str, Any]], top: int) -> dict[str, Any]:
    """`top` of the alternatives of each token."""
    content = [
        {**_token(entry), "top_logprobs": [_token(one) for one in entry["top"][:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class LegacyLogprobs:
    """Collects tokens; offsets count from the beginning of the text, `echoed` characters of the
    prompt included."""

    def __init__(self, top: int, echoed: int = 0) -> None:
        self._top = top
        self._offset = echoed

    def render(self, entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
        shape: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [] if self._top else None,
            "text_offset": [],
        }
        for entry in entries:
            shape["tokens"].append(entry["token"])
            shape["token_logprobs"].append(finite(entry["logprob"]))
            shape["text_offset"].append(self._offset)
            if self._top:
                shape["top_logprobs"].append(self._alternatives(entry))
            self._offset += len(entry["token"])
        return shape

    def _alternatives(self, entry: dict[str, Any]) -> dict[str, float]:
        """The most likely tokens and the one that was taken."""
        named = {one["token"]: finite(one["logprob"]) for one in entry["top"][: self._top]}
        return {entry["token"]: finite(entry["logprob"])} | named
