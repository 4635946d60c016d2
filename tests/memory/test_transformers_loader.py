"""Models of transformers, whole and in parts, against `from_pretrained`, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from omnistage.contracts.errors import CheckpointError, UnsupportedCombinationError
from omnistage.memory.causal_lm import load_causal_lm, plan_causal_lm
from omnistage.memory.materialize import materialize
from omnistage.memory.plan import SourceKind
from omnistage.memory.transformers_loader import (
    load_planned,
    load_tensors,
    load_transformers,
    plan_transformers,
)
from tests.checkpoints import TOKEN_FAMILIES, checkpoint
from tests.memory.comparing import module_differences

PARTS = {
    "qwen3-omni": {
        "thinker.": "Qwen3OmniMoeThinkerForConditionalGeneration",
        "talker.": "Qwen3OmniMoeTalkerForConditionalGeneration",
        "code2wav.": "Qwen3OmniMoeCode2Wav",
    },
    "qwen2.5-omni": {
        "thinker.": "Qwen2_5OmniThinkerForConditionalGeneration",
        "talker.": "Qwen2_5OmniTalkerForConditionalGeneration",
        "token2wav.": "Qwen2_5OmniToken2WavModel",
    },
}

ALWAYS_FLOAT32 = ("token2wav.",)
"""Parts that the whole casts when it makes them."""


def model_class(name):
    import transformers

    return getattr(transformers, name)


def family_class(family):
    return model_class(TOKEN_FAMILIES[family].architecture)


def part_config(folder, prefix):
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(folder), f"{prefix.rstrip('.')}_config")


def reference(family, dtype, folder=None):
    import torch

    folder = folder or checkpoint(family)
    return family_class(family).from_pretrained(folder, dtype=getattr(torch, dtype))


def load_part(family, prefix, **arguments):
    folder = checkpoint(family)
    return load_transformers(
        model_class(PARTS[family][prefix]),
        folder,
        config=part_config(folder, prefix),
        prefix=prefix,
        **arguments,
    )


def rewritten(family, target, change):
    """A copy whose tensors `change(state)` altered."""
    shutil.copytree(checkpoint(family), target)
    file = target / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})
    return target


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [name for name in TOKEN_FAMILIES if name not in PARTS])
def test_whole_models_load_as_from_pretrained_loads_them(family, dtype):
    ours, plan = load_causal_lm(checkpoint(family), dtype=dtype)
    assert not plan.by_library
    assert module_differences(ours, reference(family, dtype)) == []
    assert ours.generation_config.eos_token_id is not None


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", PARTS)
def test_parts_load_as_parts_of_the_whole(family, dtype):
    whole = reference(family, dtype)
    for prefix in PARTS[family]:
        wanted = "float32" if prefix in ALWAYS_FLOAT32 else dtype
        ours, plan = load_part(family, prefix, dtype=wanted)
        assert plan.component == prefix.rstrip(".")
        assert module_differences(ours, whole.get_submodule(plan.component)) == []


@pytest.mark.invariant("LOAD-INV-002")
def test_experts_of_a_part_are_fused_by_the_mapping_of_the_whole():
    _, plan = load_part("qwen3-omni", "talker.")
    made = [name for name, s in plan.sources.items() if s.kind is SourceKind.CONVERTED]
    assert any(name.endswith("experts.gate_up_proj") for name in made)
    assert plan.conversions


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-omni"])
def test_shards_load_as_one_file(family, tmp_path):
    whole = reference(family, "float32")
    whole.save_pretrained(tmp_path, max_shard_size="200kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours, plan = load_transformers(family_class(family), tmp_path)
    assert module_differences(ours, whole) == []
    assert len(plan.files) > 2


@pytest.mark.invariant("LOAD-INV-003")
def test_a_part_reads_only_the_files_that_hold_it(tmp_path):
    reference("qwen3-omni", "float32").save_pretrained(tmp_path, max_shard_size="200kB")
    plan = plan_transformers(
        model_class("Qwen3OmniMoeCode2Wav"),
        tmp_path,
        config=part_config(tmp_path, "code2wav."),
        prefix="code2wav.",
    )
    for file in set(tmp_path.glob("*.safetensors")) - set(plan.files):
        file.unlink()
    load_planned(plan)
    assert all(source.key.startswith("code2wav.") for source in plan.sources.values() if source.key)


@pytest.mark.invariant("LOAD-INV-003")
def test_progress_ends_at_one_and_the_plan_counts_what_is_held():
    heard = []
    module, plan = load_transformers(
        family_class("qwen3-moe"),
        checkpoint("qwen3-moe"),
        report=lambda note, fraction: heard.append(fraction),
    )
    held = {id(tensor): tensor.nbytes for tensor in [*module.parameters(), *module.buffers()]}
    assert plan.total_bytes == sum(held.values())
    assert heard[-1] == 1.0
    assert heard == sorted(heard)


@pytest.mark.invariant("LOAD-INV-001")
def test_single_tensors_by_key():
    import torch

    (embeddings,) = load_tensors(
        checkpoint("qwen3-omni"), ["thinker.model.embed_tokens.weight"], dtype="bfloat16"
    ).values()
    whole = reference("qwen3-omni", "bfloat16")
    assert torch.equal(embeddings, whole.thinker.get_input_embeddings().weight)
    with pytest.raises(CheckpointError, match=r"nearest: thinker\.model\.embed_tokens\.weight"):
        load_tensors(checkpoint("qwen3-omni"), ["thinker.model.embed_token.weight"])


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("model.norm.weight"), "missing: model.norm.weight"),
        (
            lambda state: state.update(extra=state["model.norm.weight"].clone()),
            "unexpected: extra",
        ),
        (
            lambda state: state.pop("model.layers.0.mlp.experts.1.up_proj.weight"),
            "model.layers.0.mlp.experts",
        ),
        (
            lambda state: state.update(
                {"model.layers.0.mlp.experts.4.up_proj.weight": state["model.norm.weight"].clone()}
            ),
            "model.layers.0.mlp.experts",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(change, words, tmp_path):
    folder = rewritten("qwen3-moe", tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=words.replace(".", r"\.")):
        plan_causal_lm(folder)


@pytest.mark.invariant("LOAD-INV-004")
def test_a_prefix_without_tensors_names_those_there_are():
    config = part_config(checkpoint("qwen3-omni"), "talker.")
    with pytest.raises(CheckpointError, match=r"'talk\.'; there are code2wav\., talker\., thinker"):
        plan_transformers(
            model_class("Qwen3OmniMoeTalkerForConditionalGeneration"),
            checkpoint("qwen3-omni"),
            config=config,
            prefix="talk.",
        )


@pytest.mark.invariant("LOAD-INV-004")
def test_a_file_that_changed_is_refused_also_for_converted_tensors(tmp_path):
    folder = rewritten("qwen3-moe", tmp_path / "m", lambda state: None)
    plan = plan_causal_lm(folder)
    key = "model.layers.0.mlp.experts.1.up_proj.weight"
    file = folder / "model.safetensors"
    state = load_file(file)
    state[key] = state[key].half()
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="changed while it was being loaded"):
        materialize(plan)


@pytest.mark.invariant("LOAD-INV-005")
def test_a_class_that_transformers_does_not_have_is_refused(tmp_path):
    shutil.copytree(checkpoint("qwen3"), tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["T5Model"], "model_type": "t5"}
    file.write_text(json.dumps(config))
    with pytest.raises((CheckpointError, UnsupportedCombinationError)):
        plan_causal_lm(tmp_path / "m")


@pytest.mark.invariant("LOAD-INV-002")
def test_attention_is_chosen_for_the_whole_or_by_part():
    plan = plan_causal_lm(checkpoint("qwen3"), attn_implementation="eager")
    assert plan.skeleton.look().config._attn_implementation == "eager"
    _, thinker = load_part(
        "qwen3-omni",
        "thinker.",
        attn_implementation={"": "sdpa", "text_config": "eager", "vision_config": "sdpa"},
    )
    config = thinker.skeleton.look().config
    assert config.text_config._attn_implementation == "eager"
    assert config.vision_config._attn_implementation == "sdpa"
