"""The shipped checkpoint, loaded by plain diffusers."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return REPOSITORY / "src/omnistage/models/tiny_image/checkpoint"


@pytest.fixture(scope="session")
def pipeline(checkpoint: Path) -> QwenImagePipeline:
    torch.set_num_threads(1)
    pipeline = DiffusionPipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
