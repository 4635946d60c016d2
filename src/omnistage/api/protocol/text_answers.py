"""Answers of the text routes, described for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from omnistage.api.protocol.base import ResponseModel


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class TextUsage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerFunction(ResponseModel):
    name: str
    arguments: str


class AnswerToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerAudio(ResponseModel):
    """`data` is base64 of a file of the format that was asked for."""

    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None
    audio: AnswerAudio | None = None


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChosenLogprob]
    refusal: None


class TextChatChoice(ResponseModel):
    """`stop_reason` is the stop string or the id of the stop token that ended the text."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class TextChatResponse(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[TextChatChoice]
    usage: TextUsage


class LegacyLogprobsShape(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: LegacyLogprobsShape | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class CompletionResponse(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: TextUsage


class TokenizeResponse(ResponseModel):
    """`token_strs` only where they were asked for."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    prompt: str


class ResponsesResponse(ResponseModel):
    """OpenAI's response object; `output` holds messages, function calls and reasoning."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    background: Literal[False]
    service_tier: Literal["default"]
    user: str | None
