"""Counting tokens of one answer, over all its choices."""

from __future__ import annotations

from typing import Any

from omnistage.contracts.outputs import OmniRequestOutput


class UsageCount:
    """A prompt counts once however many answers it gets; its cached tokens are those of the first
    answer, since the later ones find what that one computed."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completions: dict[tuple[int, int], int] = {}

    def add(self, event: OmniRequestOutput, prompt_index: int = 0) -> None:
        fields = event.fields
        if "prompt_tokens" in fields:
            self._prompts[prompt_index] = fields["prompt_tokens"]
        if event.child_index == 0 and "cached_tokens" in fields:
            self._cached[prompt_index] = fields["cached_tokens"]
        if "completion_tokens" in fields:
            self._completions[prompt_index, event.child_index] = fields["completion_tokens"]

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    @property
    def completion_tokens(self) -> int:
        return sum(self._completions.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def whole(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
