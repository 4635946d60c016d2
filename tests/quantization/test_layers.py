"""Which layers are chosen, on modules of the libraries without weights."""

from __future__ import annotations

import pytest
from accelerate import init_empty_weights
from torch import nn

from omnistage.quantization.config import resolve_quantization
from omnistage.quantization.layers import (
    block_paths,
    is_denoiser,
    is_modulation,
    keeps_precision,
    select_layers,
)


def qwen_image():
    from diffusers import QwenImageTransformer2DModel

    with init_empty_weights():
        return QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        )


def unet():
    from diffusers import UNet2DConditionModel

    with init_empty_weights():
        return UNet2DConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
        )


def t5():
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    with init_empty_weights():
        return T5EncoderModel(config)


def autoencoder():
    from diffusers import AutoencoderKL

    with init_empty_weights():
        return AutoencoderKL()


def chosen(module, config="fp8", component="transformer"):
    return set(select_layers(module, resolve_quantization(config), component))


@pytest.mark.invariant("QUANT-INV-006")
def test_linear_layers_of_blocks_are_chosen_and_modulation_is_not():
    paths = chosen(qwen_image())
    in_block = {
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_out.0",
        "attn.to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    }
    assert paths == {f"transformer_blocks.{n}.{name}" for n in (0, 1) for name in in_block}


@pytest.mark.invariant("QUANT-INV-006")
def test_of_a_unet_the_transformer_blocks_are_chosen():
    paths = chosen(unet(), component="unet")
    assert paths
    assert all(".transformer_blocks." in path for path in paths)
    assert not any("norm" in path or "time" in path for path in paths)


@pytest.mark.invariant("QUANT-INV-006")
def test_encoders_are_quantized_only_where_they_are_named():
    encoder = t5()
    for config in ("fp8", {"default": "fp8"}, {"transformer": "fp8"}):
        assert not chosen(encoder, config, "text_encoder")
    paths = chosen(encoder, {"text_encoder": "fp8"}, "text_encoder")
    assert len(paths) == 2 * (4 + 2)
    assert not any(path.endswith(".wo") for path in paths), "the library keeps it in float32"


@pytest.mark.invariant("QUANT-INV-006")
def test_autoencoders_and_foreign_modules_never_are():
    for module in (autoencoder(), nn.Sequential(nn.Linear(16, 16))):
        assert not is_denoiser(module)
        assert not chosen(module, {"vae": "fp8"}, "vae")


@pytest.mark.invariant("QUANT-INV-004")
def test_prefixes_and_ignored_layers_narrow_the_choice():
    module = qwen_image()
    everything = chosen(module)
    without = chosen(module, {"method": "fp8", "ignored_layers": ["img_mlp"]})
    assert everything - without == {path for path in everything if ".img_mlp." in path}
    prefix = "transformer_blocks.1.attn"
    assert chosen(module, {f"transformer.{prefix}": "fp8"}) == {
        path for path in everything if path.startswith(f"{prefix}.")
    }
    assert chosen(module, {"transformer": "fp8", f"transformer.{prefix}": None}) == {
        path for path in everything if not path.startswith(f"{prefix}.")
    }
    assert not chosen(module, {"transformer_2": "fp8"})


def test_blocks_are_the_outermost_of_their_classes():
    assert block_paths(qwen_image()) == ("transformer_blocks.0", "transformer_blocks.1")
    assert block_paths(t5()) == ("encoder.block.0", "encoder.block.1")
    lists = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleList([nn.Identity()])])})
    assert block_paths(lists) == ("blocks.0",)
    assert block_paths(nn.Linear(2, 2)) == ()


@pytest.mark.invariant("QUANT-INV-006")
def test_modulation_is_chosen_where_it_is_asked_for_and_computes_in_bf16():
    module = qwen_image()
    config = {"method": "fp8", "compute": "fp8", "modulation": True}
    settings = select_layers(module, resolve_quantization(config), "transformer")
    added = set(settings) - chosen(module)
    assert added == {
        f"transformer_blocks.{n}.{name}.1" for n in (0, 1) for name in ("img_mod", "txt_mod")
    }
    assert {settings[path].compute for path in added} == {"bf16"}
    assert settings["transformer_blocks.0.attn.to_q"].compute == "fp8"


@pytest.mark.parametrize("name", ["img_mod.1", "norm1.linear", "adaLN_modulation.0"])
def test_names_of_modulation(name):
    assert is_modulation(name)
    assert not keeps_precision(name)


@pytest.mark.parametrize("name", ["time_emb_proj", "patch_embed", "mlp.gate", "shared_gate"])
def test_kept_names(name):
    assert keeps_precision(name)


@pytest.mark.parametrize(
    "name", ["model.to_q", "mlp.gate_proj", "proj_out", "img_mlp.net.2", "self_attn.q_proj"]
)
def test_quantized_names(name):
    assert not keeps_precision(name)
    assert not is_modulation(name)
