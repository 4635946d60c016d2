"""`/v1/completions`: from its body to jobs for the engine, and to its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from omnistage.api.context import AppContext
from omnistage.api.event_stream import DONE, data_event
from omnistage.api.protocol.completions import CompletionRequest
from omnistage.api.text.checks import check_choices
from omnistage.api.text.logprobs import LegacyLogprobs
from omnistage.api.text.merge import run_jobs
from omnistage.api.text.params import TokenWishes, params_by_stage
from omnistage.api.text.run import TextJob
from omnistage.api.text.tool_plan import structured_format
from omnistage.api.text.usage import UsageCount
from omnistage.contracts.errors import InternalError, UnsupportedCombinationError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import OmniRequestOutput


@dataclass(slots=True, kw_only=True)
class CompletionPlan:
    """`echoes` is the text that each choice begins with."""

    jobs: list[TextJob]
    n: int
    echoes: list[str]
    logprobs: int | None
    include_usage: bool


def plan_completion(context: AppContext, body: CompletionRequest) -> CompletionPlan:
    """Check everything that can be known before the engine is asked."""
    context.lifecycle.check_serving()
    context.check_model(body.model)
    n = body.n or 1
    prompts = _prompts(body)
    check_choices(context.settings, n * len(prompts))
    _check_combinations(body, prompts)
    wishes = TokenWishes(
        knobs=body,
        logprobs=body.logprobs,
        structured=structured_format(body.response_format),
        stream=bool(body.stream),
    )
    params = params_by_stage(context.engine.config, wishes)
    shared: dict[str, Any] = {}
    if body.add_special_tokens is not None:
        shared["add_special_tokens"] = body.add_special_tokens
    jobs = [
        TextJob(
            prompt={**prompt, **shared},
            params=params,
            n=n,
            priority=body.priority or 0,
            suffix=f"-{number}" if len(prompts) > 1 else "",
        )
        for number, prompt in enumerate(prompts)
    ]
    return CompletionPlan(
        jobs=jobs,
        n=n,
        echoes=[prompt["prompt"] if body.echo else "" for prompt in prompts for _ in range(n)],
        logprobs=body.logprobs,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _prompts(body: CompletionRequest) -> list[dict[str, Any]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in prompt]


def _check_combinations(body: CompletionRequest, prompts: list[dict[str, Any]]) -> None:
    if body.stream_options is not None and not body.stream:
        raise UnsupportedCombinationError(
            "stream_options needs stream: true", param="stream_options"
        )
    if body.mm_processor_kwargs is not None:
        raise UnsupportedCombinationError(
            "mm_processor_kwargs needs media, which a chat has; leave it out",
            param="mm_processor_kwargs",
        )
    if not body.echo:
        return
    if body.logprobs is not None:
        raise UnsupportedCombinationError(
            "echo with logprobs would need those of the prompt, which are not offered; leave one "
            "of them out",
            param="echo",
        )
    if any("prompt" not in prompt for prompt in prompts):
        raise UnsupportedCombinationError(
            "echo is for prompts that are text; token ids can be read by POST /detokenize",
            param="echo",
        )


@dataclass(slots=True, kw_only=True)
class _Choice:
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    entries: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, event: OmniRequestOutput) -> None:
        self.text += event.text or ""
        self.entries += event.fields.get("logprobs") or []
        if not event.partial:
            self.finish_reason = str(event.finish_reason or "stop")
            self.stop_reason = event.fields.get("stop_reason")

    def take(self) -> dict[str, Any]:
        """What came since the last call."""
        text, self.text = self.text, ""
        entries, self.entries = self.entries, []
        return {
            "index": self.index,
            "text": text,
            "logprobs": self.logprobs.render(entries) if self.logprobs else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


def _choices(plan: CompletionPlan) -> list[_Choice]:
    return [
        _Choice(
            index=index,
            text=echo,
            logprobs=None if plan.logprobs is None else LegacyLogprobs(plan.logprobs),
        )
        for index, echo in enumerate(plan.echoes)
    ]


async def whole_completion(
    context: AppContext, request: Request, plan: CompletionPlan, head: dict[str, Any]
) -> dict[str, Any]:
    choices, usage = _choices(plan), UsageCount()
    async with aclosing(run_jobs(context, request, plan.jobs)) as events:
        async for number, event in events:
            usage.add(event, number)
            if event.modality is Modality.TEXT:
                choices[number * plan.n + event.child_index].add(event)
    _check_complete(choices)
    return {**head, "choices": [choice.take() for choice in choices], "usage": usage.whole()}


async def completion_chunks(
    context: AppContext, request: Request, plan: CompletionPlan, head: dict[str, Any]
) -> AsyncGenerator[str, None]:
    choices, usage = _choices(plan), UsageCount()
    fields = {**head, "usage": None} if plan.include_usage else head
    async with aclosing(run_jobs(context, request, plan.jobs)) as events:
        async for number, event in events:
            usage.add(event, number)
            if event.modality is not Modality.TEXT:
                continue
            choice = choices[number * plan.n + event.child_index]
            choice.add(event)
            if choice.text or choice.entries or choice.finish_reason:
                yield data_event(json.dumps({**fields, "choices": [choice.take()]}))
    _check_complete(choices)
    if plan.include_usage:
        yield data_event(json.dumps({**fields, "choices": [], "usage": usage.whole()}))
    yield DONE


def _check_complete(choices: list[_Choice]) -> None:
    if any(choice.finish_reason is None for choice in choices):
        raise InternalError("the model finished without an answer")
