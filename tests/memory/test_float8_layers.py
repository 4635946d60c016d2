"""Checkpoints that store float8 weights, in every spelling that is read."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnistage.contracts.errors import CheckpointError, UnsupportedCombinationError
from omnistage.memory.float8_layers import QuantizationRequest
from omnistage.memory.host.preflight import directly_mappable
from omnistage.memory.materialize import materialize
from omnistage.memory.pipeline_plan import plan_pipeline
from omnistage.memory.plan import SourceKind
from omnistage.memory.planner import plan_module
from omnistage.memory.planning.sizes import empty_module
from omnistage.memory.renaming import rename
from omnistage.quantization.config import resolve_quantization
from omnistage.quantization.convert import convert_module, make_transforms, quantized_layers
from tests.checkpoints.store import checkpoint

WEIGHTS = "diffusion_pytorch_model.safetensors"


def transformer_class():
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel


def quantized_module(config="fp8", dtype=torch.bfloat16):
    folder = checkpoint("qwen_image") / "transformer"
    module = transformer_class().from_pretrained(folder, torch_dtype=dtype)
    convert_module(module, resolve_quantization(config), "transformer")
    return module


def store(folder, module, metadata=None, respell=lambda tensors: tensors):
    """As `folder`, a component's: the module's weights, and what its configuration says of them."""
    shutil.copytree(checkpoint("qwen_image") / "transformer", folder, dirs_exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(respell(tensors), folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    if metadata is not None:
        config["quantization_config"] = metadata
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_of(folder, config=None, **options):
    options = {"component": "transformer", "dtype": "bfloat16"} | options
    request = QuantizationRequest(plan=resolve_quantization(config))
    return plan_module(transformer_class(), folder, quantization=request, **options)


def renamed(endings):
    def respell(tensors):
        def key(name):
            ending = next((one for one in endings if name.endswith(one)), None)
            path = name.removesuffix(ending or "")
            quantized = f"{path}.weight_scale" in tensors
            return path + endings[ending] if ending and quantized else name

        return {key(name): tensor for name, tensor in tensors.items()}

    return respell


def reshaped(shape):
    def respell(tensors):
        return {
            name: shape(tensor) if name.endswith("weight_scale") else tensor
            for name, tensor in tensors.items()
        }

    return respell


def same(module, other):
    mine, theirs = module.state_dict(), other.state_dict()
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.invariant("QUANT-INV-001")
@pytest.mark.parametrize("metadata", [{"quant_method": "fp8"}, None], ids=["named", "unnamed"])
def test_what_was_saved_is_what_is_loaded(tmp_path, metadata):
    module = quantized_module()
    plan = plan_of(store(tmp_path / "t", module, metadata))
    loaded = materialize(plan)
    same(loaded, module)
    layers = quantized_layers(loaded)
    assert set(layers) == set(quantized_layers(module))
    assert f"stored in float8, with scales: {len(layers)} weights" in plan.describe()
    for path in layers:
        sources = [plan.sources[f"{path}.{leaf}"] for leaf in ("weight", "weight_scale")]
        assert [source.dtype for source in sources] == ["float8_e4m3fn", "float32"]
        assert all(source.kind is SourceKind.CHECKPOINT for source in sources)
    assert plan.total_bytes == sum(tensor.nbytes for tensor in module.state_dict().values())


@pytest.mark.invariant("QUANT-INV-001")
def test_its_blocks_are_mapped_as_they_lie_in_the_file(tmp_path):
    plan = plan_of(store(tmp_path / "t", quantized_module(), {"quant_method": "fp8"}))
    assert directly_mappable(plan, ["transformer_blocks.0", "transformer_blocks.1"]) is None


@pytest.mark.parametrize(
    "endings",
    [
        {".weight_scale": ".scale_weight"},
        {".weight_scale": "._weight_scale", ".weight": "._weight_qdata"},
    ],
    ids=["comfyui", "torchao"],
)
def test_other_spellings_are_read(tmp_path, endings):
    module = quantized_module()
    respell = renamed(endings)
    folder = store(tmp_path / "t", module, {"quant_method": "torchao"}, respell)
    stored = load_file(folder / WEIGHTS)
    assert not any(key.endswith(".weight_scale") for key in stored)
    same(materialize(plan_of(folder)), module)


def test_static_scales_of_inputs_stay_unused_and_are_named(tmp_path):
    def respell(tensors):
        paths = [name.removesuffix(".weight_scale") for name in tensors if "weight_scale" in name]
        return tensors | {f"{path}.input_scale": torch.ones(()) for path in paths}

    module = quantized_module()
    metadata = {"quant_method": "modelopt", "quant_algo": "FP8"}
    plan = plan_of(store(tmp_path / "t", module, metadata, respell))
    assert len(plan.unused_keys) == len(quantized_layers(module))
    assert "stored but unused" in plan.describe()
    same(materialize(plan), module)


@pytest.mark.parametrize(
    "shape",
    [
        lambda scale: scale.flatten(),
        lambda scale: scale.mean().reshape(1),
        lambda scale: scale.mean(),
        lambda scale: scale.bfloat16(),
    ],
    ids=["rows", "one", "number", "bfloat16"],
)
def test_scales_of_any_shape_and_dtype_mean_what_they_say(tmp_path, shape):
    module = quantized_module()
    loaded = materialize(plan_of(store(tmp_path / "t", module, None, reshaped(shape))))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for path, layer in quantized_layers(loaded).items():
        full = quantized_layers(module)[path]
        scale = shape(full.weight_scale).float().reshape(-1, 1)
        wide = full.weight.float() * scale
        assert torch.equal(layer.dequantized(torch.bfloat16), wide.bfloat16())
        assert layer.weight_scale.dtype is torch.float32
        inputs = x[:, : layer.in_features]
        if inputs.shape[1] == layer.in_features:
            assert layer(inputs).shape == (3, layer.out_features)


@pytest.mark.invariant("QUANT-INV-001")
def test_layers_that_a_checkpoint_keeps_in_full_precision_stay_so(tmp_path):
    module = quantized_module({"method": "fp8", "ignored_layers": ["img_mlp"]})
    metadata = {"quant_method": "fp8", "modules_to_not_convert": ["img_mlp"]}
    folder = store(tmp_path / "t", module, metadata)
    plan = plan_of(folder, "fp8")
    same(materialize(plan), module)
    made = make_transforms(
        resolve_quantization("fp8"),
        {"transformer": plan.skeleton.look()},
        device="cpu",
        float8=False,
    )
    assert made == {}, "nothing is quantized on top"


@pytest.mark.invariant("QUANT-INV-001")
@pytest.mark.parametrize(
    "config",
    ["none", {"transformer": None}, {"method": "fp8", "ignored_layers": ["img_mlp"]}],
)
def test_a_setting_that_contradicts_the_checkpoint_is_an_error(tmp_path, config):
    folder = store(tmp_path / "t", quantized_module(), {"quant_method": "fp8"})
    with pytest.raises(UnsupportedCombinationError, match=r"stores transformer.* as fp8"):
        plan_of(folder, config)
    assert quantized_layers(plan_of(folder, {"transformer": "fp8"}).skeleton.look())


@pytest.mark.invariant("QUANT-INV-001")
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "of the method bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "with scales of blocks"),
        ({"quant_method": "fp8"}, "without float8 weights"),
    ],
)
def test_checkpoints_of_other_methods_are_refused(tmp_path, metadata, message):
    plain = transformer_class().from_pretrained(checkpoint("qwen_image") / "transformer")
    folder = store(tmp_path / "t", plain, metadata)
    for config in (None, "fp8"):
        with pytest.raises(UnsupportedCombinationError, match=message):
            plan_of(folder, config)


@pytest.mark.invariant("QUANT-INV-001")
def test_only_where_it_is_asked_for_are_quantized_checkpoints_read(tmp_path):
    folder = store(tmp_path / "t", quantized_module(), {"quant_method": "fp8"})
    with pytest.raises(UnsupportedCombinationError, match="quantized"):
        plan_module(transformer_class(), folder)


def test_scales_that_do_not_fit_are_named(tmp_path):
    respell = reshaped(lambda scale: scale[:-1].contiguous())
    folder = store(tmp_path / "t", quantized_module(), None, respell)
    with pytest.raises(CheckpointError, match="one floating number a row or one for all"):
        plan_of(folder)


def test_float8_with_a_scale_where_there_is_no_linear_layer_is_named(tmp_path):
    def respell(tensors):
        odd = torch.zeros(16, 16).to(torch.float8_e4m3fn)
        return tensors | {"wrong.weight": odd, "wrong.weight_scale": torch.ones(16, 1)}

    folder = store(tmp_path / "t", quantized_module(), None, respell)
    with pytest.raises(CheckpointError, match=r"transformer.wrong in float8.*nothing of that name"):
        plan_of(folder)


def test_a_pipeline_with_a_quantized_transformer_is_planned_and_the_rest_is_not_touched(tmp_path):
    folder = tmp_path / "pipeline"
    shutil.copytree(checkpoint("qwen_image"), folder)
    module = quantized_module()
    store(folder / "transformer", module, {"quant_method": "fp8"})
    plan = plan_pipeline(folder, dtype="bfloat16")
    same(materialize(plan.modules["transformer"]), module)
    assert not quantized_layers(plan.modules["text_encoder"].skeleton.look())


def tensor_bytes(module):
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.nbytes for name, tensor in tensors}


@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_bytes_after_conversion_are_known_before_anything_is_read(component):
    plan = plan_pipeline(checkpoint("qwen_image"), dtype="bfloat16").modules[component]
    quantization = resolve_quantization({component: "fp8"})
    modules = {component: plan.skeleton.look()}
    transform = make_transforms(quantization, modules, device="cpu", float8=False)[component]
    planned = tensor_bytes(empty_module(plan, transform))
    loaded = materialize(plan, transform=transform)
    assert quantized_layers(loaded)
    assert planned == tensor_bytes(loaded)
    assert sum(planned.values()) < plan.total_bytes


@pytest.mark.invariant("QUANT-INV-001")
def test_an_encoder_of_transformers_is_read_under_its_own_names(tmp_path):
    """Its checkpoint spells names otherwise than its module; both have the same float8 layers."""
    from transformers import Qwen2_5_VLForConditionalGeneration as Encoder

    source = checkpoint("qwen_image") / "text_encoder"
    quantization = resolve_quantization({"text_encoder": "fp8"})
    module = materialize(plan_module(Encoder, source, component="text_encoder", dtype="bfloat16"))
    convert_module(module, quantization, "text_encoder")
    layers = quantized_layers(module)
    assert any(".language_model.layers." in path for path in layers)
    names = {
        name: key
        for key, name in rename(
            module, load_file(source / "model.safetensors"), sharded=False
        ).names.items()
    }
    shutil.copytree(source, tmp_path / "e")
    tensors = {
        stored_key(name, names): tensor.contiguous()
        for name, tensor in module.state_dict().items()
        if name not in module.all_tied_weights_keys
    }
    assert set(tensors) != set(module.state_dict()), "the library renames"
    save_file(tensors, tmp_path / "e" / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "e" / "config.json").write_text(json.dumps(config))
    request = QuantizationRequest(plan=resolve_quantization(None))
    plan = plan_module(
        Encoder,
        tmp_path / "e",
        component="text_encoder",
        dtype="bfloat16",
        quantization=request,
    )
    same(materialize(plan), module)


def stored_key(name, names):
    stem = name.removesuffix("_scale")
    return names[stem] + name.removeprefix(stem)
