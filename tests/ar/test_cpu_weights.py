"""Packed weights on a CPU: the same tokens, and nothing touched where they are turned off."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from omnistage.ar import cpu_weights
from omnistage.ar.cpu_weights import PackedLinear, pack_linears
from omnistage.ar.fusion import LeadingLinear
from omnistage.attention.cpu_kernel import decode_kernel
from tests.ar.test_greedy_parity import assert_generated, prompts, serve
from tests.checkpoints import checkpoint


def packed_parts(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, PackedLinear)]


@pytest.mark.invariant("AR-INV-206")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_plain_layer(dtype, rows, bias):
    torch.manual_seed(0)
    parts = nn.ModuleDict({"wide": nn.Linear(200, 900, bias=bias)}).to(dtype)
    x = torch.randn(1, rows, 200).to(dtype)
    with torch.inference_mode():
        expected = parts["wide"](x)
        assert pack_linears(parts) == 1
        found = parts["wide"](x)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.invariant("AR-INV-206")
def test_only_layers_that_gain_are_packed():
    parts = nn.ModuleDict(
        {
            "small": nn.Linear(8, 16),
            "wide": nn.Linear(128, 1024),
            "narrow": nn.Linear(1024, 128),
            "hooked": nn.Linear(128, 1024),
        }
    )
    parts["hooked"].register_forward_hook(lambda *_: None)
    pack_linears(parts)
    assert packed_parts(parts) == ["wide"]


@pytest.mark.invariant("AR-INV-206")
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gemma3", "phi"])
def test_tokens_are_the_same_with_and_without(family, monkeypatch):
    monkeypatch.setattr(cpu_weights, "MIN_WEIGHTS", 1)
    batch = list(prompts(family))[:6]
    on, tokens_on = serve(family, batch, max_num_seqs=6)
    off, tokens_off = serve(family, batch, max_num_seqs=6, fuse_layers=False)
    model_on, model_off = (d.executor.inner._loaded.model.module for d in (on, off))
    assert "lm_head" in packed_parts(model_on)
    leaders = [part for part in model_on.modules() if isinstance(part, LeadingLinear)]
    assert leaders
    assert all(leader.weight is None for leader in leaders)
    kernels = [d.executor.inner._loaded.runner.backend.kernel for d in (on, off)]
    assert kernels == [decode_kernel(), None]
    plain = AutoModelForCausalLM.from_pretrained(checkpoint(family))
    assert [type(part) for part in model_off.modules()] == [type(part) for part in plain.modules()]
    assert tokens_on == tokens_off
    assert_generated(family, batch, tokens_on)
