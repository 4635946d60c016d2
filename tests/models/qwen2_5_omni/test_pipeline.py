"""The topology that a checkpoint's configuration gives, and what its parts refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from omnistage.contracts.errors import ConfigurationError
from omnistage.contracts.modalities import Modality
from omnistage.models.qwen2_5_omni.library import opens_speech_of_unpadded_prompts
from omnistage.models.qwen2_5_omni.loading import (
    build_talker,
    plan_talker,
    plan_thinker,
    plan_token2wav,
)
from omnistage.models.qwen2_5_omni.pipeline import (
    TALKER,
    TALKER_DEFAULTS,
    THINKER,
    THINKER_DEFAULTS,
    TOKEN2WAV,
    pipeline_config,
)
from omnistage.models.registry import find_pipeline
from omnistage.models.token_index import GENERATION_CONFIG
from tests.checkpoints import checkpoint
from tests.models.qwen2_5_omni import reference
from tests.models.qwen2_5_omni.requests import resolved


def test_three_stages_of_which_text_and_sound_are_final():
    pipeline = find_pipeline(str(checkpoint(reference.CHECKPOINT))).pipeline
    finals = [stage.output_modality for stage in pipeline.stages if stage.final_output]
    assert [stage.name for stage in pipeline.stages] == ["thinker", "talker", "token2wav"]
    assert finals == [Modality.TEXT, Modality.AUDIO]
    assert pipeline.consumers(THINKER) == (pipeline.stages[TALKER],)
    assert pipeline.consumers(TALKER) == (pipeline.stages[TOKEN2WAV],)
    assert pipeline.default_sampling_params[TALKER] == TALKER_DEFAULTS
    assert pipeline.default_sampling_params[THINKER] == THINKER_DEFAULTS


def test_defaults_are_those_of_generate():
    import inspect

    from transformers import Qwen2_5OmniForConditionalGeneration

    called = inspect.signature(Qwen2_5OmniForConditionalGeneration.generate).parameters
    ours = {"max_new_tokens": "max_tokens"}
    for name in ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty"):
        default = called[f"talker_{name}"].default
        assert default == TALKER_DEFAULTS[ours.get(name, name)], name
    assert called["thinker_max_new_tokens"].default == THINKER_DEFAULTS["max_tokens"]
    assert called["talker_do_sample"].default is True


def test_a_checkpoint_without_a_talker_writes_only():
    pipeline = pipeline_config({"enable_audio_output": False})
    assert [stage.name for stage in pipeline.stages] == ["thinker"]
    assert "feeds_stages" not in pipeline.options[THINKER]


def test_a_checkpoint_without_a_talker_is_served(tmp_path):
    from omnistage import Omni

    folder = tmp_path / "thinker"
    shutil.copytree(checkpoint(reference.CHECKPOINT), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"enable_audio_output": False}))
    (folder / "spk_dict.pt").unlink()
    from tests.models.qwen2_5_omni.requests import THINKER_PARAMS, omni_prompt

    with Omni(str(folder), process="inline", kv_cache_gib=0.05) as omni:
        (output,) = omni.generate(
            omni_prompt(reference.CASES["image"]), THINKER_PARAMS, use_tqdm=False
        )
    assert output.outputs[0].token_ids == reference.expected("image").text_ids


def test_the_thinker_samples_where_the_checkpoint_says_so():
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    defaults = pipeline_config({GENERATION_CONFIG: generation}).default_sampling_params
    assert defaults[THINKER] == THINKER_DEFAULTS | {"temperature": 0.7, "top_k": 20}


def test_each_stage_plans_its_own_part():
    planned = {
        THINKER: plan_thinker,
        TALKER: plan_talker,
        TOKEN2WAV: plan_token2wav,
    }
    sizes = {id_: plan(resolved(id_), "cpu").total_bytes for id_, plan in planned.items()}
    whole = (checkpoint(reference.CHECKPOINT) / "model.safetensors").stat().st_size
    assert all(0 < size < 0.9 * whole for size in sizes.values())
    assert 0.9 * whole < sum(sizes.values()) < 1.2 * whole, "and what modules compute themselves"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_code": 9}, "max_codes"), ({"max_codes": 0}, "int"), ({"opens_speech": 1}, "bool")],
)
def test_wrong_options_of_the_talker_are_refused(options, words):
    model = {"model": options}
    with pytest.raises(ConfigurationError, match=words):
        build_talker(resolved(TALKER, options=model), "cpu", lambda note, fraction: None)


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-004")
def test_the_installed_library_is_asked_how_it_opens_speech():
    """Seen on the real call: whether its talker is handed a mask."""
    import functools

    talker, masks = reference.model().talker, []
    forward = talker.forward

    @functools.wraps(forward)
    def listening(*args, **kwargs):
        masks.append(kwargs.get("attention_mask"))
        return forward(*args, **kwargs)

    talker.forward = listening
    try:
        reference.expected.__wrapped__("text")
    finally:
        del talker.forward
    assert opens_speech_of_unpadded_prompts() is (masks[0] is not None)


def test_importing_it_needs_no_torch():
    code = "import sys, omnistage.models.qwen2_5_omni.pipeline; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "False"
