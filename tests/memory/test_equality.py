"""Loading by plan against `DiffusionPipeline.from_pretrained`, bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from omnistage.memory.pipeline_loader import load_pipeline, plan_pipeline
from omnistage.memory.plan import SourceKind
from tests.checkpoints import FAMILIES, checkpoint
from tests.memory.comparing import pipeline_differences


def reference(path, dtype):
    import torch
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(path, torch_dtype=getattr(torch, dtype))


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loads_as_the_library_does(family, dtype):
    path = checkpoint(family)
    plan = plan_pipeline(path, dtype=dtype)
    assert not any(module.by_library for module in plan.modules.values())
    assert pipeline_differences(load_pipeline(plan).pipeline, reference(path, dtype)) == []


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_the_comparison_sees_one_wrong_source(component):
    """Two tensors of one shape trade places in the plan."""
    path = checkpoint("flux")
    plan = plan_pipeline(path)
    module = plan.modules[component]
    first, second = same_shape(module.sources)
    swapped = dict(module.sources)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    wrong = dataclasses.replace(
        plan, modules={**plan.modules, component: dataclasses.replace(module, sources=swapped)}
    )
    found = pipeline_differences(load_pipeline(wrong).pipeline, reference(path, "float32"))
    assert [words.partition(":")[0] for words in found] == [
        f"{component}.{name}" for name in module.sources if name in (first, second)
    ]


def same_shape(sources):
    seen = {}
    for name, source in sources.items():
        if source.kind is SourceKind.CHECKPOINT and len(source.shape) == 2:
            if source.shape in seen:
                return seen[source.shape], name
            seen[source.shape] = name
    raise AssertionError("no two matrices of one shape")


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("family", ["qwen_image", "flux", "sd15"])
def test_pictures_are_equal(family):
    import torch

    path = checkpoint(family)
    pictures = []
    for pipeline in (load_pipeline(plan_pipeline(path)).pipeline, reference(path, "float32")):
        pipeline.set_progress_bar_config(disable=True)
        result = pipeline(
            **FAMILIES[family].call,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        )
        pictures.append(np.asarray(result.images))
    assert pictures[1].std() > 0.05
    assert np.array_equal(*pictures)
