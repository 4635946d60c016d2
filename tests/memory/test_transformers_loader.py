"""Models of transformers, whole and in parts, against `from_pretrained`, bit for bit."""

from __future__ import annotations

import json

import pytest

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.plan import SourceKind
from omnistage.memory.transformers_loader import (
    load_planned,
    load_tensors,
    load_transformers,
    plan_transformers,
)
from tests.checkpoints import TOKEN_FAMILIES, broken, checkpoint
from tests.memory.comparing import module_differences

PARTS = {
    "qwen3-omni": {
        "thinker.": "Qwen3OmniMoeThinkerForConditionalGeneration",
        "talker.": "Qwen3OmniMoeTalkerForConditionalGeneration",
        "code2wav.": "Qwen3OmniMoeCode2Wav",
    },
}


def model_class(name):
    import transformers

    return getattr(transformers, name)


def part_of(module, prefix):
    return module.get_submodule(prefix.rstrip("."))


def part_config(folder, prefix):
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(folder), f"{prefix.rstrip('.')}_config")


def whole(family, dtype):
    import torch

    cls = model_class(TOKEN_FAMILIES[family].architecture)
    return cls.from_pretrained(checkpoint(family), dtype=getattr(torch, dtype))


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [name for name in TOKEN_FAMILIES if name not in PARTS])
def test_whole_models_load_as_from_pretrained_loads_them(family, dtype):
    cls = model_class(TOKEN_FAMILIES[family].architecture)
    ours, plan = load_transformers(cls, checkpoint(family), dtype=dtype)
    assert not plan.by_library
    assert module_differences(ours, whole(family, dtype)) == []


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", PARTS)
def test_parts_load_as_parts_of_the_whole(family, dtype):
    folder, reference = checkpoint(family), whole(family, dtype)
    for prefix, name in PARTS[family].items():
        ours, plan = load_transformers(
            model_class(name), folder, config=part_config(folder, prefix), prefix=prefix, dtype=dtype
        )
        assert plan.component == prefix.rstrip(".")
        assert module_differences(ours, part_of(reference, prefix)) == []
