"""Float8 layers on a GPU: the device's own products against their meaning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.platforms.registry import platform_of
from omnistage.quantization.fp8 import Fp8Linear, quantize_rows

DEVICE = "cuda:0"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def layer_and_inputs(rows, dtype=torch.bfloat16):
    torch.manual_seed(0)
    full = nn.Linear(256, 384, device=DEVICE, dtype=dtype).requires_grad_(False)
    full.weight *= torch.logspace(-2, 1, 384, device=DEVICE)[:, None].to(dtype)
    return full, torch.randn(rows, 256, device=DEVICE, dtype=dtype)


def error(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("rows", [1, 7, 16, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float8_products_are_those_of_dequantized_factors(rows, dtype):
    if not platform_of(DEVICE).capabilities(DEVICE).float8:
        pytest.skip("this GPU does not multiply float8")
    full, x = layer_and_inputs(rows, dtype)
    layer = Fp8Linear.from_linear(full, compute="fp8")
    quantized, scale = quantize_rows(x)
    wide = (layer.weight.double() * layer.weight_scale).t()
    exact = (quantized.double() * scale) @ wide + full.bias.double()
    assert layer(x).dtype is dtype
    assert error(layer(x), exact) < 2**-7
    assert error(layer(x), full(x)) < 0.05


@pytest.mark.parametrize("compute", ["bf16", "fp8"])
def test_compiled_for_any_number_of_rows(compute):
    if compute == "fp8" and not platform_of(DEVICE).capabilities(DEVICE).float8:
        pytest.skip("this GPU does not multiply float8")
    full, _ = layer_and_inputs(1)
    layer = Fp8Linear.from_linear(full, compute=compute)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (300, 33, 2):
        _, x = layer_and_inputs(rows)
        assert error(compiled(x), layer(x)) < 2**-7


def test_quantizing_on_the_gpu_equals_quantizing_on_the_cpu():
    full, _ = layer_and_inputs(1)
    here, there = quantize_rows(full.weight), quantize_rows(full.weight.cpu())
    for found, expected in zip(here, there, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
