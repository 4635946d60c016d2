"""An engine without a model: the interface of `AsyncOmni`, with pictures of one colour each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from omnistage.config.pipeline import ExecutionType, PipelineConfig, StageConfig
from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.contracts.errors import OmniError, UnavailableError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import (
    PARTIAL_IMAGE_INDEX,
    FinishReason,
    OmniProgress,
    OmniRequestOutput,
)
from omnistage.contracts.requests import OmniPrompt, PromptLike
from omnistage.contracts.sampling import OmniDiffusionSamplingParams, SamplingParams

MODEL = "example/fake-image"
DEFAULT_SIDE = 32
COLOURS = ("red", "green", "blue", "yellow")


def fake_config(modality: Modality = Modality.IMAGE) -> OmniConfig:
    stage = StageConfig(
        stage_id=0,
        name="fake",
        execution_type=ExecutionType.DIFFUSION,
        runtime="tests.api.fake_engine:none",
        final_output=True,
        output_modality=modality,
    )
    return OmniConfig(
        model=MODEL,
        model_path="/nowhere",
        served_model_name=MODEL,
        pipeline=PipelineConfig(model_type="fake", stages=(stage,)),
        stages=(ResolvedStage(stage=stage, model_path="/nowhere", process="inline"),),
    )


@dataclass(kw_only=True)
class FakeHealth:
    live: bool = True
    ready: bool = True
    reason: str | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)


class FakeMetrics:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str, int]] = []
        self.images = 0
        self.recorded = asyncio.Event()

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.requests.append((route, method, status))
        self.recorded.set()

    def images_generated(self, count: int) -> None:
        self.images += count

    def render(self) -> tuple[bytes, str]:
        return b"# TYPE fake counter\nfake 1\n", "text/plain; version=0.0.4; charset=utf-8"


@dataclass(kw_only=True)
class Call:
    prompt: OmniPrompt
    params: OmniDiffusionSamplingParams
    request_id: str
    output_modalities: Any
    trace_context: str | None


class FakeEngine:
    """`hold` keeps every request running until it is set; `error` fails the next requests, before
    the first event or, with `error_after_progress`, behind progress and previews."""

    def __init__(self, *, modality: Modality = Modality.IMAGE, error: Exception | None = None):
        self.config = fake_config(modality)
        self.metrics = FakeMetrics()
        self.state = FakeHealth()
        self.error = error
        self.error_after_progress = False
        self.picture_noise = False
        self.stopped = False
        self.start_error: OmniError | None = None
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self.hold = asyncio.Event()
        self.hold.set()
        self.running = asyncio.Event()
        self.aborted = asyncio.Event()
        self.calls: list[Call] = []
        self.aborted_ids: list[str] = []
        self.active: set[str] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.lifecycle: list[str] = []
        self.report: Callable[[str], None] = lambda word: None
        """Called with what the engine is told to do, and "running" for each request."""

    async def start(self) -> None:
        self._say("start")
        await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error

    async def drain(self, timeout_s: float) -> None:
        self._say("drain")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.idle.wait()

    async def shutdown(self) -> None:
        self._say("shutdown")
        self.stopped = True
        self.hold.set()

    async def abort(self, request_id: str) -> None:
        self.aborted_ids.append(request_id)

    def health(self) -> FakeHealth:
        return self.state

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
    ) -> AsyncIterator[OmniRequestOutput]:
        assert isinstance(prompt, dict)
        assert isinstance(sampling_params, OmniDiffusionSamplingParams)
        assert request_id is not None
        assert request_id not in self.active, "request ids must be unique"
        call = Call(
            prompt=prompt,
            params=sampling_params,
            request_id=request_id,
            output_modalities=output_modalities,
            trace_context=trace_context,
        )
        self.calls.append(call)
        if self.error is not None and not self.error_after_progress:
            raise self.error
        self.active.add(request_id)
        self.idle.clear()
        try:
            async for event in self._events(call):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted_ids.append(request_id)
            self.aborted.set()
            raise
        finally:
            self.active.discard(request_id)
            if not self.active:
                self.idle.set()

    async def _events(self, call: Call) -> AsyncIterator[OmniRequestOutput]:
        yield OmniRequestOutput(
            request_id=call.request_id,
            progress=OmniProgress(stage_id=0, step=1, total_steps=2),
            partial=True,
        )
        for index in range(call.params.partial_images or 0):
            yield self._preview(call, index)
        if self.error is not None:
            raise self.error
        self.running.set()
        self.report("running")
        await self.hold.wait()
        if self.stopped:
            raise UnavailableError("the engine shut down")
        yield OmniRequestOutput(
            request_id=call.request_id,
            modality=Modality.IMAGE,
            images=self._pictures(call.params),
            finished=True,
            finish_reason=FinishReason.STOP,
        )

    def _preview(self, call: Call, index: int) -> OmniRequestOutput:
        """Pictures that are black but for `index` in every channel."""
        total = call.params.partial_images or 0
        return OmniRequestOutput(
            request_id=call.request_id,
            modality=Modality.IMAGE,
            partial=True,
            images=[
                Image.new("RGB", picture.size, (index, index, index))
                for picture in self._pictures(call.params)
            ],
            fields={PARTIAL_IMAGE_INDEX: index, "step": index + 1, "total_steps": total + 1},
        )

    def _pictures(self, params: OmniDiffusionSamplingParams) -> list[Image.Image]:
        size = (params.width or DEFAULT_SIDE, params.height or DEFAULT_SIDE)
        if self.picture_noise:
            picture = Image.effect_noise(size, 90).convert("RGB")
            return [picture] * params.num_outputs_per_prompt
        return [
            Image.new("RGB", size, COLOURS[index % len(COLOURS)])
            for index in range(params.num_outputs_per_prompt)
        ]

    def _say(self, word: str) -> None:
        self.lifecycle.append(word)
        self.report(word)
