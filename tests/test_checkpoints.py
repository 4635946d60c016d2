"""Every tiny checkpoint loads with plain diffusers and gives pictures that can expose errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoints import FAMILIES, broken, checkpoint

REPOSITORY = Path(__file__).parents[1]
SIZE_LIMIT_BYTES = 1_500_000


def load(folder: Path):
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline, name: str, seed: int = 0, **changes) -> torch.Tensor:
    """What the family's call, changed so, gives as a tensor (C, H, W)."""
    call = FAMILIES[name].call | changes
    generator = torch.Generator("cpu").manual_seed(seed)
    (image,) = pipeline(**call, generator=generator, output_type="pt").images
    return image


@pytest.fixture(scope="module")
def pipeline():
    return cache(lambda name: load(checkpoint(name)))


@pytest.fixture(scope="module")
def reference(pipeline):
    return cache(lambda name: draw(pipeline(name), name))


@pytest.mark.parametrize("name", FAMILIES)
def test_picture_is_loud_and_repeatable(name, pipeline, reference):
    image = reference(name)
    assert image.isfinite().all()
    assert image.std() >= 0.05
    assert ((image == 0) | (image == 1)).float().mean() < 0.5, "mostly clipped"
    assert torch.equal(image, draw(pipeline(name), name))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_input_matters(name, pipeline, reference):
    changes = [{"seed": 1}, {"prompt": "the blue dog under a tree"}]
    if "negative_prompt" in FAMILIES[name].call:
        changes.append({"negative_prompt": "a bad house"})
    for change in changes:
        changed = draw(pipeline(name), name, **change)
        assert (changed - reference(name)).abs().max() > 0.02, change


@pytest.mark.parametrize("name", FAMILIES)
def test_rounding_errors_stay_small(name, reference):
    """A chaotic checkpoint would turn the last bit of a weight into another picture, and no
    tolerance could tell an error from a reordered sum."""
    disturbed = load(checkpoint(name))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for component in disturbed.components.values():
            if isinstance(component, torch.nn.Module):
                for weight in component.parameters():
                    weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=generator))
    image = reference(name)
    assert (draw(disturbed, name) - image).abs().max() < 5e-4 * image.std()


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_is_small_and_names_its_pipeline(name):
    folder = checkpoint(name)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size <= SIZE_LIMIT_BYTES
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == FAMILIES[name].pipeline_class


def test_importing_the_package_loads_no_heavy_library():
    statement = (
        "import sys, tests.checkpoints; "
        "print({'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", statement]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "set()"


def test_concurrent_processes_build_a_checkpoint_once(tmp_path):
    statement = "from tests.checkpoints import checkpoint; print(checkpoint('pixart_sigma'))"
    environment = os.environ | {"OMNISTAGE_TEST_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", statement],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [Path(*folders).name]


def test_a_builder_that_dies_leaves_nothing_that_passes_for_a_checkpoint(tmp_path, monkeypatch):
    def dies(folder: Path) -> None:
        folder.mkdir()
        (folder / "model_index.json").write_text("{}")
        raise InterruptedError

    monkeypatch.setenv("OMNISTAGE_TEST_CACHE", str(tmp_path))
    family = FAMILIES["pixart_sigma"]
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, family.name, replace(family, build=dies))
        with pytest.raises(InterruptedError):
            checkpoint(family.name)
    folder = checkpoint(family.name)
    assert (folder / "transformer").is_dir()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_builds_are_equal_byte_for_byte(tmp_path):
    family = FAMILIES["flux"]
    for folder in (tmp_path / "first", tmp_path / "second"):
        torch.rand(1)  # the caller's random state is no input
        family.build(folder)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


@pytest.mark.parametrize("name", ["pixart_sigma", "sd15"])
@pytest.mark.parametrize("damage", broken.REFUSED, ids=lambda damage: damage.__name__)
def test_damage_stops_plain_diffusers_or_spoils_the_picture(name, damage, tmp_path, reference):
    source = checkpoint(name)
    before = contents(source)
    target = damage(source, tmp_path / "damaged")
    assert contents(source) == before
    try:
        image = draw(load(target), name)
    except (OSError, ValueError, AttributeError):
        return
    assert damage in (broken.missing_tensor, broken.wrong_dtype)
    assert not torch.equal(image, reference(name))


@pytest.mark.parametrize("name", ["pixart_sigma", "sd15", "sd3"])
@pytest.mark.parametrize("change", broken.ACCEPTED, ids=lambda change: change.__name__)
def test_harmless_changes_leave_the_picture(name, change, tmp_path, reference):
    target = change(checkpoint(name), tmp_path / "changed")
    assert torch.equal(draw(load(target), name), reference(name))


def test_sharded_splits_every_component(tmp_path):
    folder = broken.sharded(checkpoint("sd3"), tmp_path / "sharded")
    components = {path.parent.name for path in folder.rglob("*.safetensors.index.json")}
    assert components == {
        "transformer",
        "vae",
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
    }


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
