"""Bodies of `/tokenize` and `/detokenize`, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from omnistage.api.protocol.base import ApiModel, CleanText, ModelName
from omnistage.api.protocol.chat import MAX_MESSAGES
from omnistage.api.protocol.messages import TextMessage
from omnistage.api.protocol.sampling import TokenId
from omnistage.api.protocol.tool_fields import Tools


class TokenizeRequest(ApiModel):
    """Either `prompt`, or `messages` with what belongs to them."""

    model: ModelName | None = None
    prompt: CleanText | None = None
    messages: Annotated[list[TextMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                "one_source", "give either prompt or messages", {"field": "prompt"}
            )
        return self


class DetokenizeRequest(ApiModel):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**21)]
