"""From a `config.json` or a GGUF file to a pipeline, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from omnistage.config.pipeline import ExecutionType
from omnistage.contracts.errors import CheckpointError, UnsupportedCombinationError
from omnistage.contracts.modalities import Modality
from omnistage.models import registry
from omnistage.models.causal_lm.pipeline import default_sampling_params
from omnistage.models.registry import find_pipeline
from omnistage.models.token_index import causal_lm_architectures, token_index


@pytest.fixture
def model_folder(tmp_path):
    """`model_folder(architecture, …)`: a directory with nothing but configurations."""

    def make(architecture, generation=None, **config):
        folder = tmp_path / "my-model"
        folder.mkdir()
        if architecture is not None:
            config["architectures"] = [architecture]
        (folder / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


@pytest.mark.invariant("MODEL-INV-001")
def test_a_causal_language_model_is_one_token_stage(model_folder):
    folder = model_folder("Qwen3ForCausalLM", {"do_sample": True, "top_k": 20})
    entry = find_pipeline(str(folder))
    assert entry.model_path == folder
    assert entry.served_name == "my-model"
    assert entry.pipeline.model_type == "causal_lm"
    assert entry.pipeline.hf_architectures == ("Qwen3ForCausalLM",)
    (stage,) = entry.pipeline.stages
    assert stage.execution_type is ExecutionType.LLM_AR
    assert stage.output_modality is Modality.TEXT
    assert stage.final_output
    assert entry.pipeline.default_sampling_params == {0: {"temperature": 1.0, "top_k": 20}}


@pytest.mark.invariant("MODEL-INV-001")
def test_what_the_pipeline_names_exists(model_folder):
    from importlib import import_module

    pipeline = find_pipeline(str(model_folder("LlamaForCausalLM"))).pipeline
    names = [pipeline.stages[0].runtime, pipeline.options[0]["token_model"]]
    for name in [*names, names[1].replace(":build", ":plan")]:
        module, _, attribute = name.partition(":")
        assert callable(getattr(import_module(module), attribute))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": 2},
            {"temperature": 0.6, "top_p": 0.9},
        ),
        (
            {"repetition_penalty": 1.1, "max_new_tokens": 64},
            {"temperature": 0.0, "repetition_penalty": 1.1, "max_tokens": 64},
        ),
    ],
)
def test_a_request_that_says_nothing_gets_what_the_checkpoint_recommends(generation, expected):
    assert default_sampling_params(generation) == expected


@pytest.mark.invariant("MODEL-INV-001")
@pytest.mark.parametrize("architecture", registry.TOKEN_FAMILIES)
def test_omni_models_have_families_of_their_own(architecture, model_folder):
    module = registry.TOKEN_FAMILIES[architecture]
    if find_spec(module.rpartition(".")[0]) is None:
        pytest.skip(f"{module} is not there yet")
    pipeline = find_pipeline(str(model_folder(architecture))).pipeline
    assert len(pipeline.stages) == 3


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        ("MyForCausalLM", {"auto_map": {"AutoModelForCausalLM": "my.My"}}, "code comes with the"),
        ("BertForMaskedLM", {}, "is a BertForMaskedLM, which is not served; served are"),
        ("WhisperForConditionalGeneration", {}, "which is not served"),
    ],
)
def test_what_is_not_served_says_what_it_is_and_what_is(architecture, config, words, model_folder):
    with pytest.raises(UnsupportedCombinationError, match=words):
        find_pipeline(str(model_folder(architecture, **config)))


def test_code_that_comes_along_is_not_needed_where_transformers_has_the_class(model_folder):
    folder = model_folder("Phi3ForCausalLM", auto_map={"AutoModelForCausalLM": "phi3.Phi3"})
    assert find_pipeline(str(folder)).pipeline.model_type == "causal_lm"


def test_a_configuration_that_names_no_class_is_refused(model_folder):
    with pytest.raises(CheckpointError, match="names no architectures"):
        find_pipeline(str(model_folder(None)))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_configuration_names_the_file(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        token_index(tmp_path)


class TestGGUF:
    def test_a_file_or_the_only_one_of_a_folder(self, tmp_path):
        file = tmp_path / "SmolLM2-Q4.gguf"
        file.write_bytes(b"GGUF\x03\x00\x00\x00")
        for model, name in ((file, "SmolLM2-Q4"), (tmp_path, tmp_path.name)):
            entry = find_pipeline(str(model))
            assert entry.model_path == file
            assert entry.served_name == name
            assert entry.pipeline.model_type == "causal_lm"

    def test_of_several_one_must_be_named(self, tmp_path):
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(CheckpointError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
            find_pipeline(str(tmp_path))

    def test_a_file_that_is_none_is_refused(self, tmp_path):
        (tmp_path / "a.gguf").write_bytes(b"version https://git-lfs")
        with pytest.raises(CheckpointError, match="no GGUF file"):
            find_pipeline(str(tmp_path / "a.gguf"))


def test_the_classes_read_from_the_source_are_those_of_the_library():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = causal_lm_architectures()
    assert {"Qwen3ForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel"} <= names
    mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert names == {name for name in mapped if name.endswith(("ForCausalLM", "LMHeadModel"))}


@pytest.mark.invariant("MODEL-INV-010")
def test_finding_a_token_model_loads_neither_torch_nor_transformers(model_folder):
    folder = model_folder("Qwen3ForCausalLM")
    statement = (
        "import sys; from omnistage.models.registry import find_pipeline; "
        f"find_pipeline({str(folder)!r}); "
        "print({'torch', 'diffusers', 'transformers', 'gguf'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "set()"
