"""The adapter against the pipeline that the model's own folder makes."""

from __future__ import annotations

from dataclasses import replace

from omnistage.api.tts.base import Voices
from omnistage.api.tts.qwen_omni import QwenOmniSpeech
from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.models.qwen3_omni.pipeline import pipeline_config
from tests.api.fake_speech import speech_config

INDEX = {"talker_config": {"speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303}}}


def served(index: dict[str, object]) -> OmniConfig:
    pipeline = pipeline_config(index)
    stages = tuple(
        ResolvedStage(stage=stage, model_path="/nowhere", process="inline")
        for stage in pipeline.stages
    )
    return replace(speech_config(), pipeline=pipeline, stages=stages)


def test_voices_are_those_of_the_talkers_configuration() -> None:
    config = served(INDEX)
    assert QwenOmniSpeech().matches(config)
    assert QwenOmniSpeech().voices(config) == Voices(
        names=("chelsie", "ethan", "aiden"), default="ethan"
    )


def test_a_checkpoint_without_a_talker_does_not_speak() -> None:
    assert not QwenOmniSpeech().matches(served({**INDEX, "enable_audio_output": False}))
