"""Plans of single models: names that differ from the checkpoint's, ties, casts, layouts."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from omnistage.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    UnsupportedCombinationError,
)
from omnistage.memory.materialize import materialize
from omnistage.memory.plan import SourceKind
from omnistage.memory.planner import plan_module
from tests.memory.comparing import module_differences, tensors


def library_loads(cls, folder, dtype, **options):
    import torch

    from omnistage.memory.skeleton import library_of

    name = "dtype" if library_of(cls) == "transformers" else "torch_dtype"
    return cls.from_pretrained(folder, **{name: getattr(torch, dtype)}, **options)


def check_equal(cls, folder, dtype="float32", variant=None):
    plan = plan_module(cls, folder, dtype=dtype, variant=variant)
    options = {"variant": variant} if variant else {}
    ours, theirs = materialize(plan), library_loads(cls, folder, dtype, **options)
    assert module_differences(ours, theirs) == []
    return plan, ours


def saved(folder, cls, config, **options):
    import torch

    torch.manual_seed(0)
    model = cls(config) if not isinstance(config, dict) else cls(**config)
    model.save_pretrained(folder, **options)
    return folder


def qwen3(folder, *, moe=False, tied=False, **options):
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": tied,
    }
    if not moe:
        config = transformers.Qwen3Config(**sizes)
        return saved(folder, transformers.Qwen3ForCausalLM, config, **options)
    config = transformers.Qwen3MoeConfig(
        **sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
    return saved(folder, transformers.Qwen3MoeForCausalLM, config, **options)


def t5(folder, name):
    import transformers

    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return saved(folder, getattr(transformers, name), config)


WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 1,
    "rope_max_seq_len": 32,
}


@pytest.mark.invariant("LOAD-INV-002")
def test_tied_heads_are_one_parameter(tmp_path):
    from transformers import Qwen3ForCausalLM

    plan, model = check_equal(Qwen3ForCausalLM, qwen3(tmp_path / "m", tied=True), "bfloat16")
    assert plan.sources["lm_head.weight"].kind is SourceKind.TIED
    assert plan.sources["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert plan.sources["lm_head.weight"].nbytes == 0
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.invariant("LOAD-INV-002")
def test_ties_hold_whichever_of_both_names_is_stored(tmp_path):
    from transformers import Qwen3ForCausalLM

    folder = qwen3(tmp_path / "m", tied=True)
    file = folder / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, file, metadata={"format": "pt"})
    plan, _ = check_equal(Qwen3ForCausalLM, folder)
    assert plan.sources["model.embed_tokens.weight"].tied_to == "lm_head.weight"


@pytest.mark.invariant("LOAD-INV-002")
def test_what_is_stored_as_different_is_not_tied(tmp_path):
    from transformers import Qwen3ForCausalLM

    folder = qwen3(tmp_path / "m", tied=True)
    file = folder / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
    save_file(state, file, metadata={"format": "pt"})
    _, model = check_equal(Qwen3ForCausalLM, folder)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.invariant("LOAD-INV-002")
def test_a_base_model_loads_from_the_checkpoint_of_a_whole_one(tmp_path):
    from transformers import Qwen3Model

    plan, _ = check_equal(Qwen3Model, qwen3(tmp_path / "m", tied=True))
    assert plan.sources["embed_tokens.weight"].key == "model.embed_tokens.weight"


@pytest.mark.invariant("LOAD-INV-003")
def test_experts_are_fused_by_plan_and_the_plan_says_so(tmp_path):
    from transformers import Qwen3MoeForCausalLM

    plan, _ = check_equal(Qwen3MoeForCausalLM, qwen3(tmp_path / "m", moe=True), "bfloat16")
    assert not plan.by_library
    assert plan.conversions
    assert "converted while loading" in plan.describe()


@pytest.mark.invariant("LOAD-INV-004")
def test_beside_converted_tensors_nothing_is_left_at_random(tmp_path):
    from transformers import Qwen3MoeForCausalLM

    folder = qwen3(tmp_path / "m", moe=True)
    file = folder / "model.safetensors"
    state = load_file(file)
    del state["model.norm.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        materialize(plan_module(Qwen3MoeForCausalLM, folder))


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_transformers_keeps_some_weights_in_float32(tmp_path, dtype):
    from transformers import T5EncoderModel

    plan, _ = check_equal(T5EncoderModel, t5(tmp_path / "m", "T5EncoderModel"), dtype)
    kept = {name for name, source in plan.sources.items() if source.dtype == "float32"}
    assert all(".wo." in name for name in kept)
    assert bool(kept) == (dtype == "float16")


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_diffusers_keeps_some_weights_in_float32(tmp_path, stored):
    import torch
    from diffusers import WanTransformer3DModel

    folder = saved(tmp_path / "m", WanTransformer3DModel, WAN)
    file = folder / "diffusion_pytorch_model.safetensors"
    state = {key: tensor.to(getattr(torch, stored)) for key, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    plan, _ = check_equal(WanTransformer3DModel, folder, "bfloat16")
    assert {source.dtype for source in plan.sources.values()} >= {"float32", "bfloat16"}
    assert "cast while loading" in plan.describe()


@pytest.mark.invariant("LOAD-INV-002")
def test_an_encoder_loads_from_the_checkpoint_of_a_whole_model(tmp_path):
    from transformers import T5EncoderModel

    folder = t5(tmp_path / "m", "T5ForConditionalGeneration")
    plan, _ = check_equal(T5EncoderModel, folder)
    assert all(key.startswith("decoder.") for key in plan.unused_keys)
    assert "stored but unused: decoder." in plan.describe()


@pytest.mark.invariant("LOAD-INV-002")
def test_attention_blocks_of_early_autoencoders_are_renamed(tmp_path):
    from diffusers import AutoencoderKL

    config = {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 2}
    folder = saved(tmp_path / "m", AutoencoderKL, config)
    file = folder / "diffusion_pytorch_model.safetensors"
    early = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(file)
    for new, old in early.items():
        state = {key.replace(f".{new}.", f".{old}."): value for key, value in state.items()}
    save_file(state, file, metadata={"format": "pt"})
    plan, _ = check_equal(AutoencoderKL, folder)
    source = plan.sources["encoder.mid_block.attentions.0.to_q.weight"]
    assert source.key == "encoder.mid_block.attentions.0.query.weight"


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("shard_size", ["8KB", "1GB"])
def test_shards_and_variants(tmp_path, variant, shard_size):
    from transformers import Qwen3ForCausalLM

    folder = qwen3(tmp_path / "m", variant=variant, max_shard_size=shard_size)
    plan, _ = check_equal(Qwen3ForCausalLM, folder, "bfloat16", variant)
    assert (len(plan.files) > 1) == (shard_size == "8KB")
    assert plan.variant == variant
    assert bool(variant) == ("variant 'fp16'" in plan.describe())


@pytest.mark.invariant("LOAD-INV-001")
def test_every_parameter_and_buffer_has_a_source(tmp_path):
    from transformers import Qwen3ForCausalLM

    folder = qwen3(tmp_path / "m", tied=True)
    plan = plan_module(Qwen3ForCausalLM, folder)
    module = plan.skeleton.look()
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    assert set(plan.sources) == names
    stored = [s for s in plan.sources.values() if s.kind is SourceKind.CHECKPOINT]
    assert all(s.file == folder / "model.safetensors" and s.offset_bytes for s in stored)
    assert plan.total_bytes == plan.bytes_by_device["cpu"] > 0


@pytest.mark.invariant("LOAD-INV-001")
def test_missing_and_unexpected_keys_name_each_other(tmp_path):
    from transformers import Qwen3ForCausalLM

    folder = qwen3(tmp_path / "m")
    file = folder / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.self_attn.q_norm.wait"] = state.pop(
        "model.layers.0.self_attn.q_norm.weight"
    )
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        plan_module(Qwen3ForCausalLM, folder)
    message = str(caught.value)
    assert (
        "missing: model.layers.0.self_attn.q_norm.weight (nearest: model.layers.0.self" in message
    )
    assert "unexpected: model.layers.0.self_attn.q_norm.wait (nearest: model.layers.0" in message


def test_auto_is_what_is_stored_but_float32_on_the_cpu(tmp_path):
    import torch
    import transformers

    folder = qwen3(tmp_path / "m")
    cls = transformers.Qwen3ForCausalLM
    cls.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    assert plan_module(cls, folder).dtype == "float32"
    assert plan_module(cls, folder, device="cuda:0").dtype == "bfloat16"
    assert plan_module(cls, folder, device="cuda:0", dtype="float16").dtype == "float16"
    with pytest.raises(ConfigurationError, match="allowed: auto, float32, bfloat16, float16"):
        plan_module(cls, folder, dtype="int4")


@pytest.mark.invariant("QUANT-INV-002")
def test_quantized_checkpoints_are_refused(tmp_path):
    import json

    from transformers import Qwen3ForCausalLM

    folder = qwen3(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCombinationError, match="quantized"):
        plan_module(Qwen3ForCausalLM, folder)


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize(
    "content", [None, "{", '{"hidden_size": "wide"}', '{"num_hidden_layers": -1}']
)
def test_a_bad_configuration_is_named(tmp_path, content):
    from transformers import Qwen3ForCausalLM

    folder = qwen3(tmp_path / "m")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        plan_module(Qwen3ForCausalLM, folder)
    assert str(folder) in str(caught.value)


@pytest.mark.invariant("LOAD-INV-002")
def test_threads_that_plan_and_load_at_once_do_not_disturb_each_other(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from transformers import Qwen3ForCausalLM

    folder = qwen3(tmp_path / "m", tied=True)
    expected = library_loads(Qwen3ForCausalLM, folder, "bfloat16")

    def load(_):
        return materialize(plan_module(Qwen3ForCausalLM, folder, dtype="bfloat16"))

    with ThreadPoolExecutor(4) as pool:
        for model in pool.map(load, range(24), timeout=120):
            assert module_differences(model, expected) == []
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.gpu
@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_same_bits_arrive(tmp_path, dtype):
    import torch
    from transformers import Qwen3ForCausalLM

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = qwen3(tmp_path / "m", tied=True)
    model = materialize(plan_module(Qwen3ForCausalLM, folder, dtype=dtype, device="cuda:0"))
    expected = library_loads(Qwen3ForCausalLM, folder, dtype).to("cuda:0")
    assert module_differences(model, expected) == []
    assert {tensor.device.type for _, tensor in tensors(model)} == {"cuda"}
