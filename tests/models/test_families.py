"""The families' folders: small, registered once, and named by what exists."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import omnistage.models
from omnistage.config.pipeline import PipelineConfig
from omnistage.diffusion.options import read_options
from omnistage.models import registry

MODELS = Path(omnistage.models.__file__).parent
MAX_LINES = 150
STEP_CLASSES = {
    "FluxPipeline",
    "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
}
FAMILY_FOLDERS = sorted({path.split(".")[2] for path in registry.FAMILIES.values()})


def pipeline_of(class_name: str) -> PipelineConfig:
    from importlib import import_module

    module = import_module(registry.FAMILIES[class_name])
    return module.pipeline_config({"_class_name": class_name})


@pytest.mark.invariant("MODEL-INV-020")
@pytest.mark.parametrize("folder", FAMILY_FOLDERS)
def test_a_family_is_a_folder_of_at_most_150_lines(folder):
    lines = sum(len(path.read_text().splitlines()) for path in (MODELS / folder).rglob("*.py"))
    assert 0 < lines <= MAX_LINES


@pytest.mark.invariant("MODEL-INV-001")
def test_every_class_is_registered_once():
    source = Path(registry.__file__).read_text()
    named = Counter(
        line.split('"')[1] for line in source.splitlines() if '"omnistage.models.' in line
    )
    assert set(registry.FAMILIES) <= set(named)
    assert set(named.values()) == {1}
    assert set(registry.FAMILIES) == STEP_CLASSES


@pytest.mark.invariant("MODEL-INV-020")
@pytest.mark.parametrize("class_name", sorted(registry.FAMILIES))
def test_what_a_family_names_exists(class_name):
    import diffusers

    from omnistage.diffusion.imports import load_family
    from omnistage.diffusion.signature import signature_of

    class Pipeline:
        transformer = None

    pipeline_class = getattr(diffusers, class_name)
    config = pipeline_of(class_name)
    assert config.diffusers_class_name == class_name
    options = read_options(config.options[0])
    family = load_family(options.step_family, Pipeline())
    signature = signature_of(pipeline_class)
    assert [name for name in family.known_arguments if name not in signature] == []
    assert options.supports_request_batch == ("Edit" not in class_name)
    assert (options.image_input == "required") == ("Edit" in class_name)
