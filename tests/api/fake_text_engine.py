"""An engine without a model that writes text: token-stage events, scripted for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omnistage.config.pipeline import ExecutionType, PipelineConfig, StageConfig
from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.contracts.errors import InvalidRequestError, UnavailableError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import FinishReason, OmniRequestOutput
from omnistage.contracts.requests import PromptLike
from omnistage.contracts.sampling import OmniTokenSamplingParams, SamplingParams
from tests.api.fake_engine import FakeEngine

TEXT_MODEL = "example/fake-text"
RATE_HZ = 24_000
PROMPT_TOKENS, CACHED_TOKENS = 7, 4


def text_config(*, speaks: bool = False, model_path: str = "/nowhere") -> OmniConfig:
    """A writer, and with `speaks` a talker and a codec behind it."""
    kinds = frozenset({Modality.TEXT, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO})
    stages = [
        StageConfig(
            stage_id=0,
            name="writer",
            execution_type=ExecutionType.LLM_AR,
            runtime="tests.api.fake_text_engine:none",
            final_output=True,
            output_modality=Modality.TEXT,
            input_modalities=kinds if speaks else frozenset({Modality.TEXT}),
        )
    ]
    if speaks:
        stages += [
            StageConfig(
                stage_id=1,
                name="talker",
                execution_type=ExecutionType.LLM_AR,
                runtime="tests.api.fake_text_engine:none",
                input_sources=(0,),
                output_modality=Modality.TOKENS,
            ),
            StageConfig(
                stage_id=2,
                name="codec",
                execution_type=ExecutionType.LLM_GENERATION,
                runtime="tests.api.fake_text_engine:none",
                input_sources=(1,),
                final_output=True,
                output_modality=Modality.AUDIO,
            ),
        ]
    return OmniConfig(
        model=TEXT_MODEL,
        model_path=model_path,
        served_model_name=TEXT_MODEL,
        pipeline=PipelineConfig(model_type="fake", stages=tuple(stages)),
        stages=tuple(
            ResolvedStage(stage=stage, model_path=model_path, process="inline") for stage in stages
        ),
    )


@dataclass(kw_only=True)
class TextCall:
    prompt: dict[str, Any]
    params: list[SamplingParams]
    request_id: str
    output_modalities: Any
    priority: int
    n: int

    @property
    def writer(self) -> OmniTokenSamplingParams:
        first = self.params[0]
        assert isinstance(first, OmniTokenSamplingParams)
        return first


def one_token(token: str) -> dict[str, Any]:
    """A log probability as a token stage reports it; -inf among the alternatives."""
    data = list(token.encode())
    alternatives = [("other", -1.5), ("never", float("-inf")), (token, -0.25)]
    return {
        "token_id": len(token),
        "token": token,
        "bytes": data,
        "logprob": -0.25,
        "rank": 1,
        "top": [
            {
                "token_id": i,
                "token": text,
                "bytes": list(text.encode()),
                "logprob": value,
                "rank": i + 1,
            }
            for i, (text, value) in enumerate(alternatives)
        ],
    }


Script = Callable[[dict[str, Any], int], Sequence[str]]
"""Prompt and child to the pieces of the text, one a token."""


@dataclass(eq=False)
class FakeTextEngine(FakeEngine):
    """`script` says what is written. `hold` keeps requests running after their first token."""

    script: Script = lambda prompt, child: ["Hello", " ", "world", "!"]
    speaks: bool = False
    model_path: str = "/nowhere"
    finish: FinishReason = FinishReason.STOP
    stop_reason: str | int | None = None
    control_answers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        FakeEngine.__init__(self)
        self.config = text_config(speaks=self.speaks, model_path=self.model_path)
        self.text_calls: list[TextCall] = []
        self.controls: list[tuple[str, dict[str, Any]]] = []

    async def call_stage(
        self,
        stage_id: int,
        method: str,
        arguments: dict[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Any:
        self.controls.append((method, arguments or {}))
        answer = self.control_answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params_list: Any = None,
        output_modalities: Any = None,
        priority: int = 0,
        timeout_s: float | None = None,
        trace_context: str | None = None,
        n: int = 1,
    ) -> AsyncIterator[OmniRequestOutput]:
        assert isinstance(prompt, dict)
        assert request_id is not None
        assert sampling_params is None
        assert request_id not in self.active, "request ids must be unique"
        call = TextCall(
            prompt=dict(prompt),
            params=sampling_params_list,
            request_id=request_id,
            output_modalities=output_modalities,
            priority=priority,
            n=n,
        )
        self.text_calls.append(call)
        if self.error is not None and not self.error_after_progress:
            raise self.error
        self.active.add(request_id)
        self.idle.clear()
        try:
            async for event in self._text_events(call):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted_ids.append(request_id)
            self.aborted.set()
            raise
        finally:
            self.active.discard(request_id)
            if not self.active:
                self.idle.set()

    async def _text_events(self, call: TextCall) -> AsyncIterator[OmniRequestOutput]:
        events = [list(self._child(call, child)) for child in range(call.n)]
        last = max(len(own) for own in events)
        for step in range(last):
            for own in events:
                if step < len(own):
                    own[step].finished = own is events[-1] and step == last - 1
                    yield own[step]
            if step == 0:
                self.running.set()
                self.report("running")
                await self.hold.wait()
                if self.error is not None:
                    raise self.error
                if self.stopped:
                    raise UnavailableError("the engine shut down")

    def _child(self, call: TextCall, child: int) -> list[OmniRequestOutput]:
        tokens = list(self.script(call.prompt, child))
        if not call.writer.delta:
            groups = [tokens]
        else:
            groups = [[token] for token in tokens] or [[]]
        events, count = [], 0
        for index, group in enumerate(groups):
            count += len(group)
            final = index == len(groups) - 1
            events.append(self._text_event(call, child, group, count, final))
        if "audio" in (call.output_modalities or []):
            events += [self._sound(call, child, part, final) for part, final in ((0, 0), (1, 1))]
        return events

    def _text_event(
        self, call: TextCall, child: int, group: list[str], count: int, final: bool
    ) -> OmniRequestOutput:
        fields: dict[str, Any] = {
            "text": "".join(group),
            "token_ids": [len(token) for token in group],
            "prompt_tokens": PROMPT_TOKENS,
            "cached_tokens": CACHED_TOKENS,
            "completion_tokens": count,
        }
        if call.writer.logprobs is not None:
            fields["logprobs"] = [one_token(token) for token in group]
        if final:
            fields["stop_reason"] = self.stop_reason
        return OmniRequestOutput(
            request_id=call.request_id,
            stage_id=0,
            child_index=child,
            modality=Modality.TEXT,
            partial=not final,
            finish_reason=self.finish if final else None,
            text=fields["text"],
            fields=fields,
        )

    @staticmethod
    def _sound(call: TextCall, child: int, part: int, final: int) -> OmniRequestOutput:
        wave = np.sin(np.arange(2400, dtype=np.float32) * 0.05 + part).astype(np.float32) * 0.5
        return OmniRequestOutput(
            request_id=call.request_id,
            stage_id=2,
            child_index=child,
            modality=Modality.AUDIO,
            partial=not final,
            finish_reason=FinishReason.STOP if final else None,
            tensors={"audio": wave},
            fields={"sample_rate": RATE_HZ},
        )


def too_long(*_: Any) -> Sequence[str]:
    raise InvalidRequestError("the prompt has 9000 tokens; the model takes 4096", param="messages")
