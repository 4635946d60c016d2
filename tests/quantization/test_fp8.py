"""Float8 layers in numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.quantization.fp8 import Fp8Linear, quantize_rows, resolve_compute

ERROR_BOUND = 0.05
"""Of a product, relative, root mean square: E4M3 has 4 significant bits, so that rounding errs by
2 to 3 percent, twice independently where inputs are rounded too."""


def linear(out_features=48, in_features=64, dtype=torch.bfloat16, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(in_features, out_features, bias=bias).to(dtype)
    rows = torch.logspace(-3, 1, out_features)[:, None]  # rows of very different magnitude
    layer.weight.data = (torch.randn(out_features, in_features) * rows).to(dtype)
    return layer.requires_grad_(False)


def inputs(dtype=torch.bfloat16, features=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 5, features, generator=generator).to(dtype)


def relative_error(found, exact):
    """The worst of all rows of the weight."""
    errors = (found.double() - exact.double()).flatten(0, -2).norm(dim=0)
    return float((errors / exact.double().flatten(0, -2).norm(dim=0)).max())


def explicit_linear(layer):
    """A plain layer with the weight that the float8 one stands for."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    wide = layer.weight.to(torch.float32) * layer.weight_scale
    plain.weight = nn.Parameter(wide, requires_grad=False)
    plain.bias = layer.bias
    return plain


@pytest.mark.invariant("QUANT-INV-005")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_scaled_to_the_largest_number(dtype):
    weight = linear(dtype=dtype).weight
    quantized, scale = quantize_rows(weight)
    assert quantized.dtype is torch.float8_e4m3fn
    assert quantized.shape == weight.shape
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (48, 1))
    assert torch.equal(scale, weight.float().abs().amax(1, keepdim=True) / 448)
    assert torch.equal(quantized.float().abs().amax(1), torch.full((48,), 448.0))


def test_zeros_and_the_smallest_numbers_stay_finite():
    weight = torch.zeros(3, 16)
    weight[1] = 1e-45
    weight[2] = 3e38
    quantized, scale = quantize_rows(weight)
    assert torch.equal(scale[:2], torch.ones(2, 1))
    assert torch.isfinite(quantized.float()).all()
    assert not quantized[:2].float().any()
    assert torch.allclose(quantized[2].float() * scale[2], weight[2])


def test_rows_do_not_depend_on_how_many_are_taken_at_a_time(monkeypatch):
    weight = linear().weight
    whole = quantize_rows(weight)
    monkeypatch.setattr("omnistage.quantization.fp8._CACHED_ITEMS", 3 * 64)
    for found, expected in zip(quantize_rows(weight), whole, strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.invariant("QUANT-INV-003")
@pytest.mark.parametrize("compute", ["bf16", "fp8"])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_near_full_precision(compute, bias):
    full, x = linear(bias=bias), inputs()
    layer = Fp8Linear.from_linear(full, compute=compute)
    exact = full(x)
    assert relative_error(layer(x), exact) < 2 * ERROR_BOUND
    assert float((layer(x) - exact).norm() / exact.norm()) < ERROR_BOUND


@pytest.mark.invariant("QUANT-INV-003")
@pytest.mark.parametrize("compute", ["bf16", "fp8"])
def test_the_bound_fails_without_scales_and_with_those_of_another_row(compute):
    full, x = linear(), inputs()
    layer = Fp8Linear.from_linear(full, compute=compute)
    scale = layer.weight_scale.data
    for wrong in (torch.ones_like(scale), scale.roll(1, 0), scale.mean().expand_as(scale)):
        layer.weight_scale.data = wrong
        assert relative_error(layer(x), full(x)) > 2 * ERROR_BOUND


@pytest.mark.invariant("QUANT-INV-003")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bf16_compute_is_the_dequantized_layer_bit_for_bit(dtype):
    layer = Fp8Linear.from_linear(linear(dtype=dtype), compute="bf16")
    plain = explicit_linear(layer).to(dtype)
    assert torch.equal(layer(inputs(dtype)), plain(inputs(dtype)))


@pytest.mark.invariant("QUANT-INV-003")
def test_float8_compute_is_the_product_of_dequantized_factors():
    layer = Fp8Linear.from_linear(linear(bias=False), compute="fp8")
    x = inputs()
    rows, scale = quantize_rows(x.reshape(-1, 64))
    exact = (rows.float() * scale) @ (layer.weight.float() * layer.weight_scale).t()
    assert relative_error(layer(x).reshape(10, 48), exact) < 2**-8
    assert layer(x).shape == (2, 5, 48)


@pytest.mark.parametrize("compute", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", [(48,), (48, 1), (1,), (1, 1), ()])
def test_scales_of_any_stored_shape_serve(compute, shape):
    layer = Fp8Linear.from_linear(linear(), compute=compute)
    one = layer.weight_scale[3]
    scale = layer.weight_scale.reshape(shape) if 48 in shape else one.reshape(shape)
    whole = scale.reshape(-1, 1).expand(48, 1).contiguous()
    expected = Fp8Linear(layer.weight, whole, layer.bias, compute=compute)
    found = Fp8Linear(layer.weight, scale, layer.bias, compute=compute)
    assert torch.equal(found(inputs()), expected(inputs()))


@pytest.mark.parametrize(("out_features", "in_features"), [(48, 60), (40, 64)])
def test_a_layer_whose_sides_do_not_fit_computes_in_bf16_and_says_so(out_features, in_features):
    full = linear(out_features, in_features)
    layer = Fp8Linear.from_linear(full, compute="fp8")
    assert layer.compute == "bf16"
    assert "compute=bf16" in repr(layer)
    x = inputs(features=in_features)
    assert torch.equal(layer(x), explicit_linear(layer).to(torch.bfloat16)(x))


@pytest.mark.parametrize("compute", ["bf16", "fp8"])
def test_it_compiles_whole_with_the_same_result(compute):
    layer = Fp8Linear.from_linear(linear(), compute=compute)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(inputs()), layer(inputs()))


@pytest.mark.invariant("QUANT-INV-005")
def test_it_is_made_of_plain_tensors_of_half_the_bytes():
    full = linear(512, 512, bias=False)
    layer = Fp8Linear.from_linear(full)
    tensors = dict(layer.named_parameters())
    assert list(tensors) == ["weight", "weight_scale"]
    assert all(type(tensor) is nn.Parameter for tensor in tensors.values())
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert sum(tensor.nbytes for tensor in tensors.values()) <= 0.51 * full.weight.nbytes


@pytest.mark.invariant("QUANT-INV-005")
def test_its_data_can_be_rebound():
    layer, other = Fp8Linear.from_linear(linear()), linear()
    other.weight.data = other.weight.data.flip(0)
    wanted = Fp8Linear.from_linear(other)
    for name, tensor in layer.named_parameters():
        bytes_of = wanted.get_parameter(name).data.contiguous().view(torch.uint8).flatten().clone()
        tensor.data = bytes_of.view(tensor.dtype).view(tensor.shape)
    assert torch.equal(layer(inputs()), wanted(inputs()))


@pytest.mark.invariant("QUANT-INV-005")
def test_casting_the_module_casts_neither_weight_nor_scale():
    layer = Fp8Linear.from_linear(linear()).to(torch.float16)
    assert layer.weight.dtype is torch.float8_e4m3fn
    assert layer.weight_scale.dtype is torch.float32
    assert layer.bias.dtype is torch.float16


def test_on_the_meta_device_it_comes_out_the_same():
    real = Fp8Linear.from_linear(linear())
    with torch.device("meta"):
        empty = Fp8Linear.from_linear(nn.Linear(64, 48).to(torch.bfloat16))
    shapes = [[(n, t.shape, t.dtype) for n, t in m.named_parameters()] for m in (real, empty)]
    assert shapes[0] == shapes[1]
    assert empty.weight.is_meta


def test_a_weight_without_data_is_not_computed_with():
    class Counted(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counted() as counted:
        quantized, scales = quantize_rows(torch.empty(8192, 8192, device="meta"))
    assert (quantized.shape, scales.shape) == ((8192, 8192), (8192, 1))
    assert counted.calls <= 4


def test_float8_products_add_the_bias():
    layer = Fp8Linear.from_linear(linear(), compute="fp8")
    without = Fp8Linear(layer.weight, layer.weight_scale, None, compute="fp8")
    x = inputs()
    assert relative_error(layer(x), without(x).float() + layer.bias.float()) < 2**-7
    assert relative_error(without(x), layer(x)) > 2**-4


@pytest.mark.invariant("QUANT-INV-002")
def test_what_auto_computes_in_follows_the_device():
    assert resolve_compute("auto", "cpu", float8=False) == "bf16"
    assert resolve_compute("auto", "cpu", float8=True) == "fp8"
    assert resolve_compute("bf16", "cpu", float8=True) == "bf16"


@pytest.mark.invariant("QUANT-INV-002")
def test_float8_compute_that_does_not_work_is_refused(monkeypatch):
    def refuse(*args, **options):
        raise NotImplementedError("no such kernel here")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(UnsupportedCombinationError, match=r"no such kernel here.*use compute bf16"):
        resolve_compute("fp8", "cpu", float8=False)
