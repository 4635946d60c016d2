"""From a chat body to a job for the engine, and to what reads its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnistage.api.audio_render import ChatAudioFormat
from omnistage.api.context import AppContext
from omnistage.api.protocol.chat_text import TextChatRequest
from omnistage.api.reasoning import ThinkSplitter
from omnistage.api.text.checks import check_choices, check_kinds, check_outputs
from omnistage.api.text.choice import AnswerReader, Choice
from omnistage.api.text.conversation import Conversation, read_messages
from omnistage.api.text.media import multi_modal_data
from omnistage.api.text.params import TokenWishes, params_by_stage, text_stage
from omnistage.api.text.run import TextJob
from omnistage.api.text.template import TemplateProfile
from omnistage.api.text.tool_plan import (
    ToolPlan,
    one_structure,
    plan_tools,
    structured_format,
)
from omnistage.api.tts.base import Voices
from omnistage.api.tts.checks import known_voice
from omnistage.api.tts.registry import ADAPTERS
from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.contracts.sampling import OmniTokenSamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """`top_logprobs` None: no log probabilities. `audio_format` None: no speech."""

    job: TextJob
    tools: ToolPlan
    begins_inside: bool | None
    """Whether a text begins as a thought; None: nothing is split."""
    keep_reasoning: bool = True
    top_logprobs: int | None = None
    audio_format: ChatAudioFormat | None = None
    include_usage: bool = False

    def choice(self, index: int) -> Choice:
        splitter = None
        if self.begins_inside is not None:
            splitter = ThinkSplitter(begins_inside=self.begins_inside)
        reader = AnswerReader(
            self.tools.make_parser(), splitter, keep_reasoning=self.keep_reasoning
        )
        return Choice(index, reader)


async def plan_chat(context: AppContext, body: TextChatRequest) -> ChatPlan:
    """Check everything that can be known before the engine is asked."""
    context.lifecycle.check_serving()
    context.check_model(body.model)
    config, n = context.engine.config, body.n or 1
    writer_id = text_stage(config)
    check_choices(context.settings, n)
    _check_combinations(body)
    conversation = read_messages(body.messages)
    check_kinds(config, conversation)
    speaks = check_outputs(config, body.modalities, body.audio)
    profile = await context.template.profile()
    tools = plan_tools(
        body.tools,
        body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
        profile=profile,
        parser=context.settings.tool_call_parser,
    )
    arguments = _template_arguments(body, profile)
    wishes = TokenWishes(
        knobs=body,
        max_tokens=body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=one_structure(tools.structured, structured_format(body.response_format)),
        stream=bool(body.stream),
        voice=_voice(context, body),
    )
    params = params_by_stage(config, wishes)
    writer = params[writer_id]
    assert isinstance(writer, OmniTokenSamplingParams)
    return ChatPlan(
        job=TextJob(
            prompt=await _prompt(context, body, conversation, tools, arguments),
            params=params,
            modalities=("text", "audio") if speaks else ("text",),
            n=n,
            priority=body.priority or 0,
        ),
        tools=tools,
        begins_inside=_begins_inside(context, body, profile, arguments, writer),
        keep_reasoning=body.include_reasoning is not False,
        top_logprobs=wishes.logprobs,
        audio_format=_audio_format(body) if speaks else None,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _voice(context: AppContext, body: TextChatRequest) -> str | None:
    """As the checkpoint spells it, where the model's family says which voices there are."""
    asked = body.audio.voice if body.audio else None
    config = context.engine.config
    for adapter in ADAPTERS:
        voices = adapter.voices(config) if adapter.matches(config) else Voices()
        if asked is not None and voices.names:
            return known_voice(voices, asked)
    return asked


def _check_combinations(body: TextChatRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise UnsupportedCombinationError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise UnsupportedCombinationError(
            "stream_options needs stream: true", param="stream_options"
        )
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise UnsupportedCombinationError(
            "max_tokens and max_completion_tokens mean the same; give one", param="max_tokens"
        )
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise UnsupportedCombinationError(
                "continue_final_message and add_generation_prompt contradict each other; give one",
                param="add_generation_prompt",
            )
        if body.messages[-1].role != "assistant":
            raise UnsupportedCombinationError(
                "continue_final_message needs a last message of role 'assistant', got "
                f"{body.messages[-1].role!r}",
                param="continue_final_message",
            )


def _template_arguments(body: TextChatRequest, profile: TemplateProfile) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return arguments
    if profile.mentions("reasoning_effort"):
        return {"reasoning_effort": effort} | arguments
    if effort == "none" and profile.mentions("enable_thinking"):
        return {"enable_thinking": False} | arguments
    raise UnsupportedCombinationError(
        f"reasoning_effort {effort!a}: this model's chat template knows none; leave it out",
        param="reasoning_effort",
    )


async def _prompt(
    context: AppContext,
    body: TextChatRequest,
    conversation: Conversation,
    tools: ToolPlan,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "tools": tools.offered,
        "chat_template_kwargs": arguments or None,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "multi_modal_data": await multi_modal_data(
            context, conversation, body.mm_processor_kwargs or {}
        )
        or None,
    }
    prompt: dict[str, Any] = {"messages": conversation.messages}
    return prompt | {name: value for name, value in options.items() if value is not None}


def _begins_inside(
    context: AppContext,
    body: TextChatRequest,
    profile: TemplateProfile,
    arguments: dict[str, Any],
    writer: OmniTokenSamplingParams,
) -> bool | None:
    """A text whose form is demanded holds to it from its first token: it has no thought."""
    wanted = context.settings.reasoning_parser
    if body.separate_reasoning is False or writer.structured is not None:
        return None
    if not profile.splits_reasoning(wanted):
        return None
    continues = body.continue_final_message or body.add_generation_prompt is False
    return not continues and profile.begins_inside(wanted, arguments)


def _audio_format(body: TextChatRequest) -> ChatAudioFormat:
    if body.audio is not None and body.audio.format is not None:
        return body.audio.format
    return "pcm16" if body.stream else "wav"
