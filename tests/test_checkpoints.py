"""Every tiny checkpoint loads with plain diffusers and gives pictures that can expose errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import FAMILIES, checkpoint

REPOSITORY = Path(__file__).parents[1]
SIZE_LIMIT_BYTES = 1_500_000


@pytest.fixture(scope="module")
def pictures():
    """`picture(name, seed, **changes)`: what the family's call gives as a tensor (C, H, W)."""
    from diffusers import DiffusionPipeline

    pipelines = {}

    def picture(name: str, seed: int = 0, **changes) -> torch.Tensor:
        if name not in pipelines:
            folder = checkpoint(name)
            pipelines[name] = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
            pipelines[name].set_progress_bar_config(disable=True)
        call = FAMILIES[name].call | changes
        generator = torch.Generator("cpu").manual_seed(seed)
        (image,) = pipelines[name](**call, generator=generator, output_type="pt").images
        return image

    return picture


@pytest.mark.parametrize("name", FAMILIES)
def test_picture_is_loud_and_depends_on_every_input(name, pictures):
    image = pictures(name)
    assert image.isfinite().all()
    assert image.std() >= 0.05
    assert ((image == 0) | (image == 1)).float().mean() < 0.5, "mostly clipped"
    assert torch.equal(image, pictures(name))
    changes = [{"seed": 1}, {"prompt": "the blue dog under a tree"}]
    if "negative_prompt" in FAMILIES[name].call:
        changes.append({"negative_prompt": "a bad house"})
    for change in changes:
        difference = (image - pictures(name, **change)).abs().max()
        assert difference > 0.02, change


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
