"""An engine that speaks without a model: text, then sound in pieces, as a Qwen-Omni pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np

from omnistage.config.pipeline import ExecutionType, PipelineConfig, StageConfig
from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import FinishReason, OmniRequestOutput
from omnistage.contracts.sampling import SamplingParams
from tests.api.fake_engine import FakeEngine
from tests.api.sounds import RATE_HZ, chirp

MODEL = "example/fake-speech"
VOICES = ("Chelsie", "Ethan")


def speech_config(voices: tuple[str, ...] = VOICES, model_type: str = "qwen3_omni") -> OmniConfig:
    kinds = (
        ("thinker", ExecutionType.LLM_AR, Modality.TEXT, True),
        ("talker", ExecutionType.LLM_AR, Modality.TOKENS, False),
        ("code2wav", ExecutionType.LLM_GENERATION, Modality.AUDIO, True),
    )
    stages = tuple(
        StageConfig(
            stage_id=index,
            name=name,
            execution_type=kind,
            runtime="tests.api.fake_speech:none",
            input_sources=(index - 1,),
            final_output=final,
            output_modality=modality,
        )
        for index, (name, kind, modality, final) in enumerate(kinds)
    )
    own = {"voices": list(voices), "default_voice": voices[0]} if voices else {}
    return OmniConfig(
        model=MODEL,
        model_path="/nowhere",
        served_model_name=MODEL,
        pipeline=PipelineConfig(model_type=model_type, stages=stages, options={1: {"model": own}}),
        stages=tuple(
            ResolvedStage(stage=stage, model_path="/nowhere", process="inline") for stage in stages
        ),
    )


class FakeSpeechEngine(FakeEngine):
    """Speaks `sound`, float32 (n,) at `rate_hz`, in `pieces`; `error` fails requests before the
    first event or, with `error_after_pieces`, behind that many pieces. `hold` keeps requests
    between the first piece and the others until it is set."""

    def __init__(self, *, config: OmniConfig | None = None, error: Exception | None = None) -> None:
        super().__init__(error=error)
        self.config = config or speech_config()
        self.sound = chirp(1.0)
        self.rate_hz = RATE_HZ
        self.pieces = 8
        self.error_after_pieces: int | None = None
        self.prompts: list[Any] = []
        self.params: list[list[SamplingParams]] = []
        self.modalities: list[Any] = []

    def with_limits(self, **limits: Any) -> FakeSpeechEngine:
        self.config = replace(self.config, limits=replace(self.config.limits, **limits))
        return self

    async def generate(  # type: ignore[override]
        self,
        prompt: Any,
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
        assert request_id is not None
        assert len(sampling_params_list) == len(self.config.stages)
        self.prompts.append(prompt)
        self.params.append(sampling_params_list)
        self.modalities.append(output_modalities)
        if self.error is not None and self.error_after_pieces is None:
            raise self.error
        try:
            async for event in self._speech(request_id):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted_ids.append(request_id)
            self.aborted.set()
            raise

    async def _speech(self, request_id: str) -> AsyncIterator[OmniRequestOutput]:
        yield OmniRequestOutput(
            request_id=request_id,
            stage_id=0,
            modality=Modality.TEXT,
            fields={"text": "said", "prompt_tokens": 12, "completion_tokens": 3},
        )
        pieces = np.array_split(self.sound, self.pieces) if len(self.sound) else []
        for index, piece in enumerate(pieces):
            if index == self.error_after_pieces:
                assert self.error is not None
                raise self.error
            yield OmniRequestOutput(
                request_id=request_id,
                stage_id=2,
                modality=Modality.AUDIO,
                partial=True,
                tensors={"audio": piece},
                fields={"sample_rate": self.rate_hz},
            )
            self.running.set()
            await self.hold.wait()
        yield OmniRequestOutput(
            request_id=request_id,
            stage_id=2,
            modality=Modality.AUDIO,
            finished=True,
            finish_reason=FinishReason.STOP,
        )
