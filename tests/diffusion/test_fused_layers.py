"""Fused layers: what is replaced, what it computes, and that it is undone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from torch import nn

from omnistage.diffusion import fused_layers
from omnistage.diffusion.fused_layers import FusedGELU, FusedLayers, is_as_exact, is_fusable
from tests.diffusion import denoisers


def layer(dtype: torch.dtype = torch.bfloat16, **changes) -> GELU:
    torch.manual_seed(0)
    return GELU(64, 128, **{"approximate": "tanh", **changes}).to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What the kernel of a card does: GELU before the only rounding."""
    whole = F.linear(x.float(), weight.float(), bias.float())
    return F.gelu(whole, approximate="tanh").to(x.dtype)


@pytest.fixture
def kernel(monkeypatch):
    """Plays the card's kernel on the CPU and counts its calls."""
    calls = []

    def fused(x, weight, bias):
        calls.append(tuple(x.shape))
        return exact(x, weight, bias)

    monkeypatch.setattr(fused_layers, "linear_gelu_tanh", fused)
    return calls


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
@pytest.mark.parametrize("name", denoisers.ALL)
def test_layers_are_replaced_and_put_back(name: str, kernel: list) -> None:
    module = denoisers.make(name).to(torch.bfloat16)
    inputs = {
        key: value.bfloat16() if isinstance(value, torch.Tensor) else value
        for key, value in denoisers.call(name).items()
    }
    with torch.no_grad():
        before = module(**inputs, return_dict=False)[0]
    parameters = dict(module.named_parameters())
    kinds = [type(part) for part in module.modules()]
    fused = FusedLayers("cpu")
    fused.install(module)
    assert len(fused) == kinds.count(GELU) > 0
    assert dict(module.named_parameters()).keys() == parameters.keys()
    assert all(parameters[key] is value for key, value in module.named_parameters())
    kernel.clear()
    with torch.no_grad():
        found = module(**inputs, return_dict=False)[0]
    assert len(kernel) == len(fused)
    scale = before.float().abs().max()
    assert (found.float() - before.float()).abs().max() < 0.05 * scale
    fused.close()
    fused.close()
    assert [type(part) for part in module.modules()] == kinds
    assert all(parameters[key] is value for key, value in module.named_parameters())
    with torch.no_grad():
        assert torch.equal(module(**inputs, return_dict=False)[0], before)


def test_on_the_cpu_nothing_is_replaced() -> None:
    module = denoisers.make(denoisers.QWEN).to(torch.bfloat16)
    fused = FusedLayers()
    fused.install(module)
    assert len(fused) == 0
    assert not any(isinstance(part, FusedGELU) for part in module.modules())


def hooked(on: str) -> GELU:
    found = layer()
    part = found if on == "layer" else found.proj
    part.register_forward_pre_hook(lambda module, args: None)
    return found


def adapted() -> GELU:
    found = layer()
    found.proj = nn.Sequential(found.proj)
    return found


def parametrized() -> GELU:
    found = layer()
    nn.utils.parametrizations.weight_norm(found.proj)
    return found


class OwnGELU(GELU):
    pass


@pytest.mark.parametrize(
    "other",
    [
        layer(approximate="none"),
        layer(bias=False),
        layer(torch.float32),
        hooked("layer"),
        hooked("proj"),
        adapted(),
        parametrized(),
        OwnGELU(64, 128, approximate="tanh").bfloat16(),
        nn.GELU(approximate="tanh"),
    ],
)
def test_other_layers_are_left_alone(other: nn.Module) -> None:
    assert is_fusable(layer(), "cpu")
    assert not is_fusable(layer(), "cuda")
    assert not is_fusable(other, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_kernel_does_not_apply_it_is_the_original_to_the_bit(dtype, kernel) -> None:
    original = layer(dtype)
    x = torch.randn(2, 5, 64).to(dtype)
    assert torch.equal(FusedGELU(original)(x), original(x))
    assert kernel == []


def test_an_adapter_put_in_later_is_used_and_stays(kernel) -> None:
    module = nn.Sequential(layer())
    original = module[0]
    fused = FusedLayers("cpu")
    fused.install(module)
    adapter = nn.Sequential(original.proj, nn.Dropout(0.0))
    module[0].proj = adapter
    kernel.clear()
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(module(x), F.gelu(adapter(x), approximate="tanh"))
    assert kernel == []
    fused.close()
    assert module[0] is original
    assert original.proj is adapter


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
def test_a_kernel_that_errs_more_is_not_used(monkeypatch) -> None:
    def other_form(x, weight, bias):
        return F.gelu(F.linear(x.float(), weight.float(), bias.float())).to(x.dtype) + 0.01

    monkeypatch.setattr(fused_layers, "linear_gelu_tanh", other_form)
    assert not is_as_exact(torch.Size((128, 64)), torch.bfloat16, "cpu")
    fused = FusedLayers("cpu")
    module = nn.Sequential(layer())
    fused.install(module)
    assert len(fused) == 0
    assert type(module[0]) is GELU
    monkeypatch.setattr(fused_layers, "linear_gelu_tanh", exact)
    assert is_as_exact(torch.Size((128, 64)), torch.bfloat16, "cpu")


def test_layers_whose_weights_wait_on_the_host_are_replaced(kernel) -> None:
    module = nn.Sequential(layer())
    waiting = FusedLayers("cuda", device="cuda:0", weights_move=True)
    assert waiting._weights_move
    fused = FusedLayers("cpu", weights_move=True)
    module.to("meta")
    fused.install(module)
    assert len(fused) == 1
    assert kernel == [(256, 64)], "tried with weights of its own"
    still = FusedLayers("cpu")
    still.install(nn.Sequential(layer()).to("meta"))
    assert len(still) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernel_of_the_card_errs_no_more(dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(0)
    original = GELU(3072, 12288, approximate="tanh").cuda().to(dtype)
    assert is_fusable(original)
    assert is_as_exact(original.proj.weight.shape, dtype, "cuda")
    x = torch.randn(2, 300, 3072, device="cuda", dtype=dtype)
    run = torch.compile(FusedGELU(original)) if compiled else FusedGELU(original)
    with torch.no_grad():
        found, separate = run(x), original(x)
        wanted = exact(x.float(), original.proj.weight.float(), original.proj.bias.float())
    assert found.shape == separate.shape
    assert (found - wanted).square().mean() <= (separate - wanted).square().mean() * 1.02
