"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator

from omnistage.api.protocol.base import CleanText, ModelName, without_extra_body
from omnistage.api.protocol.chat_text import Labels, StreamOptions
from omnistage.api.protocol.sampling import SamplingKnobs, TokenId
from omnistage.api.protocol.tool_fields import ResponseFormat
from omnistage.contracts.sampling import MAX_LOGPROBS

MAX_PROMPTS = 1024
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _prompt_kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "<text>"
    if not isinstance(prompt, list) or not prompt:
        return None
    first = prompt[0]
    if isinstance(first, str):
        return "<texts>"
    return "<lists>" if isinstance(first, list) else "<ids>"


Prompt = Annotated[
    Annotated[CleanText, Tag("<text>")]
    | Annotated[list[CleanText], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<lists>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_kind",
        custom_error_message="prompt must be a string, a list of strings, a list of token ids or a "
        "list of such lists, and not empty",
    ),
]


class CompletionRequest(SamplingKnobs, Labels):
    """`POST /v1/completions`. Without `max_tokens` a text goes on to its own end."""

    inapplicable: ClassVar[frozenset[str]] = frozenset({"suffix", "best_of"})
    inapplicable_reason: ClassVar[str] = "is not offered by this server"

    prompt: Prompt
    model: ModelName | None = None
    n: Annotated[int, Field(ge=1, le=10_000)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten_extra_body(cls, data: Any) -> Any:
        return without_extra_body(data)
