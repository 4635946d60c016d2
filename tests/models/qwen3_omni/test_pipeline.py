"""The topology that a checkpoint's configuration gives."""

from __future__ import annotations

from omnistage.contracts.modalities import Modality
from omnistage.models.qwen3_omni.pipeline import (
    CODE2WAV,
    TALKER,
    TALKER_DEFAULTS,
    THINKER,
    pipeline_config,
)
from omnistage.models.token_index import GENERATION_CONFIG


def test_three_stages_of_which_text_and_sound_are_final():
    pipeline = pipeline_config({"talker_config": {"speaker_id": {"aiden": 1, "ethan": 2}}})
    finals = [stage.output_modality for stage in pipeline.stages if stage.final_output]
    assert [stage.name for stage in pipeline.stages] == ["thinker", "talker", "code2wav"]
    assert finals == [Modality.TEXT, Modality.AUDIO]
    assert pipeline.consumers(THINKER) == (pipeline.stages[TALKER],)
    assert pipeline.consumers(TALKER) == (pipeline.stages[CODE2WAV],)
    assert pipeline.default_sampling_params[TALKER] == TALKER_DEFAULTS
    assert pipeline.default_sampling_params[THINKER] == {"temperature": 0.0}


def test_a_checkpoint_without_a_talker_writes_only():
    pipeline = pipeline_config({"enable_audio_output": False})
    assert [stage.name for stage in pipeline.stages] == ["thinker"]
    assert "feeds_stages" not in pipeline.options[THINKER]


def test_defaults_follow_the_generation_config_of_each_part():
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "thinker_max_new_tokens": 1024,
        "thinker_temperature": 0.6,
        "talker_temperature": 0.8,
        "talker_max_new_tokens": 99,
    }
    defaults = pipeline_config({GENERATION_CONFIG: generation}).default_sampling_params
    assert defaults[THINKER] == {"temperature": 0.6, "max_tokens": 1024}
    assert defaults[TALKER] == TALKER_DEFAULTS | {"temperature": 0.8, "max_tokens": 99}


def test_importing_it_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, omnistage.models.qwen3_omni.pipeline; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "False"
