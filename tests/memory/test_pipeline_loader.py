"""Whole pipelines: settings, absent parts, damage, progress, budgets."""

from __future__ import annotations

import json
import shutil

import pytest

from omnistage.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    MissingDependencyError,
    UnsupportedCombinationError,
)
from omnistage.memory.budget import MemoryBudget
from omnistage.memory.pipeline_loader import load_pipeline, plan_pipeline
from tests.checkpoints import broken, checkpoint
from tests.memory.comparing import pipeline_differences, tensors


@pytest.fixture
def copied(tmp_path):
    def copy(family):
        return shutil.copytree(checkpoint(family), tmp_path / family)

    return copy


def edit_index(folder, **changes):
    path = folder / "model_index.json"
    index = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in index.items() if value != "gone"}))
    return folder


@pytest.fixture
def no_weights(monkeypatch):
    """Whoever opens a file's data fails. Modules that planning imports are imported before, so that
    none of them keeps the failing function."""
    plan_pipeline(checkpoint("flux"))

    def refuse(*arguments, **options):
        raise AssertionError("weights were opened")

    monkeypatch.setattr("safetensors.safe_open", refuse)
    monkeypatch.setattr("safetensors.torch.load_file", refuse)


@pytest.mark.invariant("LOAD-INV-003")
def test_a_plan_opens_no_weights_and_says_what_it_found(no_weights):
    plan = plan_pipeline(checkpoint("flux"), dtype="bfloat16")
    text = plan.describe()
    for words in ("FluxPipeline", "T5EncoderModel", "bfloat16", "scheduler", "absent", "1 tied"):
        assert words in text
    stored = sum(module.total_bytes for module in plan.modules.values())
    assert plan.total_bytes == stored == plan.bytes_by_device["cpu"]


@pytest.mark.invariant("LOAD-INV-003")
def test_bytes_of_the_plan_are_bytes_of_the_pipeline():
    plan = plan_pipeline(checkpoint("flux"))
    pipeline = load_pipeline(plan).pipeline
    loaded = {
        tensor.data_ptr(): tensor.nbytes
        for name in plan.modules
        for _, tensor in tensors(getattr(pipeline, name))
    }
    assert plan.total_bytes == sum(loaded.values())


@pytest.mark.invariant("MEM-INV-001")
def test_a_budget_that_is_too_small_is_refused_before_anything_is_loaded(no_weights):
    path = checkpoint("flux")
    needed = plan_pipeline(path).total_bytes
    plan_pipeline(path, budget=MemoryBudget(limits_bytes={"cpu": needed}))
    with pytest.raises(ConfigurationError, match=r"FluxPipeline needs .* on cpu.*budget.*is"):
        plan_pipeline(path, budget=MemoryBudget(limits_bytes={"cpu": needed - 1}))


@pytest.mark.invariant("LOAD-INV-006")
@pytest.mark.parametrize("family", ["flux", "qwen_image", "flux2_klein"])
def test_what_is_loaded_is_ready_to_run(family):
    plan = plan_pipeline(checkpoint(family))
    pipeline = load_pipeline(plan).pipeline
    for name in plan.modules:
        module = getattr(pipeline, name)
        assert not any(part.training for part in module.modules())
        for _, tensor in tensors(module):
            assert tensor.device.type == "cpu"
            assert not tensor.requires_grad


@pytest.mark.invariant("LOAD-INV-002")
def test_one_plan_loads_twice_into_separate_modules():
    plan = plan_pipeline(checkpoint("flux"))
    first, second = load_pipeline(plan).pipeline, load_pipeline(plan).pipeline
    assert first.transformer is not second.transformer
    assert pipeline_differences(first, second) == []


def test_progress_counts_up_to_one_and_names_every_component():
    plan = plan_pipeline(checkpoint("flux"))
    reports = []
    load_pipeline(plan, lambda note, fraction: reports.append((note, fraction)))
    fractions = [fraction for _, fraction in reports if fraction is not None]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert reports[-1] == ("loaded", 1.0)
    notes = " ".join(note for note, _ in reports)
    assert all(name in notes for name in [*plan.modules, *plan.others])
    assert len(reports) < 150


@pytest.mark.invariant("LOAD-INV-002")
def test_settings_and_absent_parts_of_the_index_reach_the_pipeline():
    from diffusers import DiffusionPipeline

    path = checkpoint("sdxl")
    plan = plan_pipeline(path)
    assert "force_zeros_for_empty_prompt" in plan.settings
    assert {"image_encoder", "feature_extractor"} <= set(plan.absent)
    changed = load_pipeline(plan).pipeline.config["force_zeros_for_empty_prompt"]
    assert changed == DiffusionPipeline.load_config(path)["force_zeros_for_empty_prompt"]


def test_another_pipeline_class_may_use_the_same_components():
    from diffusers import FluxImg2ImgPipeline, StableDiffusionPipeline

    plan = plan_pipeline(checkpoint("flux"), pipeline_class=FluxImg2ImgPipeline)
    pipeline = load_pipeline(plan).pipeline
    assert type(pipeline) is FluxImg2ImgPipeline
    with pytest.raises(CheckpointError, match=r"lacks .*unet"):
        plan_pipeline(checkpoint("flux"), pipeline_class=StableDiffusionPipeline)


DAMAGE = {
    broken.corrupt_safetensors: "diffusion_pytorch_model.safetensors is no safetensors file",
    broken.truncated_safetensors: "diffusion_pytorch_model.safetensors is truncated",
    broken.missing_tensor: "does not fit transformer (FluxTransformer2DModel): missing: VICTIM",
    broken.wrong_shape: "of another shape: VICTIM (stored [33, 32], needed [32, 32])",
    broken.wrong_dtype: "VICTIM (stored int32, allowed any float)",
    broken.unexpected_tensor: "unexpected: no_such_layer.weight",
    broken.unknown_pipeline_class: "'NoSuchPipeline', which diffusers ",
    broken.missing_component_folder: "/transformer is missing: model_index.json names 'transf",
    broken.not_a_pipeline: "is no diffusers pipeline: it has no model_index.json",
    broken.bad_index: ".safetensors is missing: diffusion_pytorch_model.safetensors.index.json",
}


def test_all_damage_is_covered():
    assert set(broken.REFUSED) <= set(DAMAGE)


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_one_clear_error_before_any_weight_is_read(damage, tmp_path, request):
    source = checkpoint("flux")
    folder = damage(source, tmp_path / "damaged")
    victim = broken.victim(source)
    request.getfixturevalue("no_weights")
    with pytest.raises(CheckpointError) as caught:
        plan_pipeline(folder)
    message = str(caught.value)
    assert DAMAGE[damage].replace("VICTIM", victim) in message
    assert str(folder) in message
    assert "\n" not in message


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("harmless", broken.ACCEPTED, ids=lambda harmless: harmless.__name__)
def test_other_layouts_load_equal(harmless, tmp_path):
    source = checkpoint("flux")
    plan = plan_pipeline(harmless(source, tmp_path / "other"), allow_unexpected=True)
    found = pipeline_differences(
        load_pipeline(plan).pipeline, load_pipeline(plan_pipeline(source)).pipeline
    )
    assert [words for words in found if not words.startswith("config of")] == []
    unused = [key for module in plan.modules.values() for key in module.unused_keys]
    assert bool(unused) == (harmless is broken.unexpected_tensor)


@pytest.mark.invariant("LOAD-INV-002")
def test_a_variant_is_taken_where_there_is_one(copied):
    from diffusers import DiffusionPipeline

    folder = copied("flux")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(CheckpointError, match="variant 'fp16'"):
        plan_pipeline(folder, variant="fp16")
    weights.rename(weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    plan = plan_pipeline(folder, variant="fp16")
    assert {name: module.variant for name, module in plan.modules.items() if module.variant} == {
        "transformer": "fp16"
    }
    reference = DiffusionPipeline.from_pretrained(folder, variant="fp16")
    assert pipeline_differences(load_pipeline(plan).pipeline, reference) == []


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize(
    ("family", "lost", "words"),
    [
        ("flux", "scheduler", "scheduler is missing"),
        ("flux", "scheduler/scheduler_config.json", "cannot load scheduler"),
        ("flux", "tokenizer", "tokenizer is missing"),
        ("flux", "tokenizer/tokenizer.json", "no vocab.json, no merges.txt, no tokenizer.json"),
        ("flux", "tokenizer_2/tokenizer.json", "no spiece.model, no tokenizer.json"),
        ("flux", "vae/config.json", "config.json is missing; AutoencoderKL needs it"),
        ("qwen_image_edit", "processor/processor_config.json", "cannot load processor"),
        ("qwen_image_edit", "processor/tokenizer.json", "cannot load processor"),
    ],
)
def test_lost_files_are_named(copied, family, lost, words):
    folder = copied(family)
    path = folder / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_pipeline(plan_pipeline(folder))
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"_class_name": "FluxPipelin"}, CheckpointError, "nearest: FluxPipeline"),
        ({"_class_name": "gone"}, CheckpointError, "no _class_name"),
        ({"_class_name": 7}, CheckpointError, "no _class_name"),
        ({"_class_name": ["pipeline", "Mine"]}, UnsupportedCombinationError, "code comes with"),
        ({"vae": "gone"}, CheckpointError, "lacks vae"),
        ({"vae": "AutoencoderKL"}, CheckpointError, "a pair of library and class"),
        ({"vae": ["diffusers", "AutoencoderKLL"]}, CheckpointError, "nearest: AutoencoderKL"),
        ({"vae": ["diffusers", "FluxPipeline"]}, CheckpointError, "is no model"),
        ({"vae": ["transformers", "AutoModel"]}, CheckpointError, "is no model"),
        ({"tokenizer": ["os", "system"]}, CheckpointError, "from 'os'"),
        ({"tokenizer": [3, None]}, CheckpointError, "from 3"),
    ],
)
def test_a_wrong_index_is_named(copied, changes, error, words):
    folder = edit_index(copied("flux"), **changes)
    with pytest.raises(error) as caught:
        plan_pipeline(folder)
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.invariant("LOAD-INV-005")
def test_code_that_comes_with_a_model_is_not_run(copied):
    folder = copied("flux")
    for place in (folder, folder / "vae"):
        (place / "mine.py").write_text("raise SystemExit('it ran')")
    edit_index(folder, vae=["mine", "AutoencoderKL"])
    with pytest.raises(CheckpointError, match="never code that comes with a model"):
        plan_pipeline(folder)


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize("content", ["", "{", "[]", "7"])
def test_an_index_that_is_no_index_is_named(copied, content):
    folder = copied("flux")
    (folder / "model_index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        plan_pipeline(folder)


@pytest.mark.invariant("LOAD-INV-004")
def test_what_is_no_directory_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="absent does not exist"):
        plan_pipeline(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file"):
        plan_pipeline(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no model_index\.json; found: nothing"):
        plan_pipeline(tmp_path / "empty")


def test_a_missing_package_comes_with_the_command_that_installs_it(copied, monkeypatch):
    from transformers import CLIPTokenizer

    def lacks(*arguments, **options):
        raise ModuleNotFoundError("No module named 'sentencepiece'", name="sentencepiece")

    monkeypatch.setattr(CLIPTokenizer, "from_pretrained", lacks)
    with pytest.raises(MissingDependencyError, match="pip install sentencepiece"):
        load_pipeline(plan_pipeline(copied("flux")))


def test_a_dummy_of_the_library_is_a_missing_package(copied):
    import diffusers

    if not hasattr(diffusers.OnnxStableDiffusionPipeline, "_backends"):
        pytest.skip("onnxruntime is installed here")
    folder = edit_index(copied("flux"), _class_name="OnnxStableDiffusionPipeline")
    with pytest.raises(MissingDependencyError, match="pip install onnxruntime"):
        plan_pipeline(folder)


@pytest.mark.invariant("LOAD-INV-004")
def test_a_file_that_changes_after_the_plan_is_noticed(copied):
    from safetensors.torch import load_file, save_file

    folder = copied("flux")
    plan = plan_pipeline(folder)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    save_file({key: tensor.half() for key, tensor in state.items()}, file)
    with pytest.raises(CheckpointError, match="changed while it was being loaded"):
        load_pipeline(plan)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pipeline(plan)
