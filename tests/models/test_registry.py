"""From what a user names to a pipeline, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omnistage.config.pipeline import ExecutionType
from omnistage.contracts.errors import CheckpointError, UnsupportedCombinationError
from omnistage.contracts.modalities import Modality
from omnistage.models import registry
from omnistage.models.registry import find_pipeline
from omnistage.models.tiny_image import pipeline as tiny_image


@pytest.fixture
def model_folder(tmp_path):
    """`model_folder(class_name)`: a directory with nothing but the index of a pipeline."""

    def make(class_name: object) -> Path:
        folder = tmp_path / "my-model"
        folder.mkdir()
        (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
        return folder

    return make


@pytest.mark.invariant("MODEL-INV-001")
def test_a_local_directory_is_a_pipeline_of_one_denoising_stage(model_folder):
    folder = model_folder("SanaPipeline")
    entry = find_pipeline(str(folder))
    assert entry.model_path == folder
    assert entry.served_name == "my-model"
    assert entry.deploy is None
    assert entry.pipeline.diffusers_class_name == "SanaPipeline"
    (stage,) = entry.pipeline.stages
    assert stage.execution_type is ExecutionType.DIFFUSION
    assert stage.runtime == "omnistage.diffusion.runtime:DiffusionRuntime"
    assert stage.output_modality is Modality.IMAGE
    assert stage.final_output
    assert entry.pipeline.default_sampling_params == {}
    assert entry.pipeline.options == {}


@pytest.mark.invariant("MODEL-INV-001")
def test_the_runtime_named_is_the_one_that_exists():
    from importlib import import_module

    from omnistage.models.diffusers_generic.pipeline import DIFFUSION_RUNTIME

    module, _, name = DIFFUSION_RUNTIME.partition(":")
    runtime = getattr(import_module(module), name)
    assert {"scheduler", "executor"} <= set(dir(runtime))


def test_a_hub_id_is_served_under_its_own_name(model_folder, monkeypatch):
    folder = model_folder("QwenImagePipeline")
    monkeypatch.setattr(registry, "resolve_model", lambda model: folder)
    entry = find_pipeline("Qwen/Qwen-Image")
    assert entry.served_name == "Qwen/Qwen-Image"
    assert entry.pipeline.default_sampling_params == {0: {"extra_args": {"negative_prompt": " "}}}


def test_editors_need_a_picture_and_some_take_several(model_folder):
    entry = find_pipeline(str(model_folder("JoyImageEditPlusPipeline")))
    assert entry.pipeline.options == {0: {"image_input": "required", "max_images": 10}}


def test_a_family_adds_its_step_mode(model_folder):
    entry = find_pipeline(str(model_folder("QwenImageEditPlusPipeline")))
    assert entry.pipeline.options == {
        0: {
            "image_input": "required",
            "max_images": 10,
            "step_family": "omnistage.models.qwen_image.steps:QwenImageEditPlusSteps",
            "supports_request_batch": False,
        }
    }


@pytest.mark.parametrize(
    ("class_name", "what"),
    [
        ("WanPipeline", "video"),
        ("StableAudioPipeline", "audio"),
        ("MarigoldDepthPipeline", "something else than pictures"),
    ],
)
def test_what_is_not_served_yet_says_so(class_name, what, model_folder):
    with pytest.raises(UnsupportedCombinationError, match=f"{class_name} makes {what}"):
        find_pipeline(str(model_folder(class_name)))


@pytest.mark.parametrize("class_name", [None, ["my_pipeline", "MyPipeline"], 3])
def test_a_pipeline_with_code_of_its_own_is_refused(class_name, model_folder):
    with pytest.raises(CheckpointError, match="_class_name"):
        find_pipeline(str(model_folder(class_name)))


def test_a_directory_that_is_no_pipeline_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        find_pipeline(str(tmp_path))
    with pytest.raises(CheckpointError, match="neither an existing directory"):
        find_pipeline(str(tmp_path / "absent" / "deeper"))


class TestBundledModel:
    @pytest.fixture
    def package_folder(self, tmp_path, monkeypatch):
        """The model's package, somewhere else."""
        monkeypatch.setattr(tiny_image, "files", lambda package: tmp_path)
        return tmp_path

    def test_it_is_found_by_name_with_its_own_defaults(self, package_folder):
        folder = package_folder / "checkpoint"
        folder.mkdir()
        (folder / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
        entry = find_pipeline("omnistage/tiny-image")
        assert entry.served_name == "omnistage/tiny-image"
        assert entry.model_path == folder
        defaults = entry.pipeline.default_sampling_params[0]
        assert (defaults["height"], defaults["width"]) == (128, 128)
        assert entry.pipeline.model_type == "tiny_image"

    def test_an_installation_without_it_says_so(self, package_folder):
        with pytest.raises(CheckpointError, match="missing from this installation"):
            find_pipeline("omnistage/tiny-image")


def test_every_family_named_exists():
    from importlib import import_module

    for path in (*registry.BUNDLED.values(), *registry.FAMILIES.values(), registry.GENERIC_FAMILY):
        assert callable(import_module(path).pipeline_config)
    for path in registry.BUNDLED.values():
        assert callable(import_module(path).checkpoint_folder)


@pytest.mark.invariant("MODEL-INV-010")
def test_finding_a_pipeline_loads_neither_torch_nor_diffusers(model_folder):
    folder = model_folder("FluxPipeline")
    statement = (
        "import sys; from omnistage.models.registry import find_pipeline; "
        f"find_pipeline({str(folder)!r}); "
        "print({'torch', 'diffusers', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "set()"


def test_a_misspelt_bundled_name_is_not_looked_for_on_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("omnistage.models.registry.resolve_model", None)
    with pytest.raises(CheckpointError, match="did you mean 'omnistage/tiny-image'"):
        find_pipeline("omnistage/tiny-imag")
