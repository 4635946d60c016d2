"""The gate: what passes is right, what would be wrong is refused with its reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from omnistage.ar import gate
from omnistage.ar.causal_lm import CausalLM
from omnistage.ar.gate_probe import dtype_of
from omnistage.attention.paged import NAME, register
from omnistage.attention.paged_torch import TorchPagedBackend
from omnistage.contracts.errors import UnsupportedCombinationError
from tests.ar.tiny_models import COMMON, loud, paged, qwen3
from tests.checkpoints import TOKEN_FAMILIES, checkpoint

SERVED = ("qwen3", "qwen3-moe", "llama", "gemma3", "mistral", "phi", "phi3")
REFUSED = {
    "bloom": "layers 0, 1 of 2 never call",
    "gpt-oss": "s_aux",
    "qwen3-next": "layers 0, 1, 2 of 4 never call",
    "lfm2": "layers 0, 2 of 3 never call",
}


def load(family: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    register()
    module = AutoModelForCausalLM.from_pretrained(
        checkpoint(family), attn_implementation=NAME, dtype=dtype
    )
    return CausalLM(module.eval(), tokenizer=None)


def deviation(model: CausalLM, reference: list[torch.Tensor] | None = None) -> float:
    reference = reference or gate.reference_logits(model)
    return gate.check_packed(model, reference, TorchPagedBackend(), dtype_of(model))


@pytest.mark.invariant("AR-INV-203")
@pytest.mark.parametrize("family", SERVED)
def test_families_that_are_served_pass(family):
    assert deviation(load(family)) < 1e-5


@pytest.mark.invariant("AR-INV-203")
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gemma3"])
def test_rounding_of_half_floats_passes(family):
    model = load(family, torch.bfloat16)
    assert deviation(model) < 0.1
    reference = gate.reference_logits(model)
    layer = model.module.model.layers[0]
    layer.post_attention_layernorm = LeakingNorm(layer.post_attention_layernorm)
    with pytest.raises(UnsupportedCombinationError, match="differ from separate ones"):
        deviation(model, reference)


@pytest.mark.invariant("AR-INV-203")
@pytest.mark.parametrize("family", REFUSED)
def test_families_that_would_be_wrong_are_refused_with_the_reason(family):
    assert TOKEN_FAMILIES[family].gate
    with pytest.raises(UnsupportedCombinationError, match=REFUSED[family]):
        load(family)


@pytest.mark.invariant("AR-INV-203")
def test_layers_and_windows_are_what_the_module_uses():
    config = load("gemma3").module.config
    model = load("gemma3")
    windows = [spec.window for spec in model.layers]
    expected = {"sliding_attention": config.sliding_window, "full_attention": None}
    assert windows == [expected[kind] for kind in config.layer_types]
    assert {(spec.num_kv_heads, spec.head_dim, spec.value_dim) for spec in model.layers} == {
        (config.num_key_value_heads, config.head_dim, config.head_dim)
    }


class LeakingNorm(nn.Module):
    """Each packed token sees the one before it, whosever it is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.3 * x.roll(1, dims=1)


class RememberingNorm(nn.Module):
    """Keeps state on the module from one call to the next."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.inner(x) + self.last
        self.last = 0.3 * result.mean(dim=1, keepdim=True)
        return result


class CallingTwice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **arguments):
        self.inner(**arguments)
        return self.inner(**arguments)


@pytest.mark.invariant("AR-INV-203")
@pytest.mark.parametrize("fault", [LeakingNorm, RememberingNorm])
def test_a_leak_between_sequences_is_found(fault):
    module = paged(copy.deepcopy(qwen3()))
    layer = module.model.layers[1]
    layer.post_attention_layernorm = fault(layer.post_attention_layernorm)
    with pytest.raises(UnsupportedCombinationError, match="differ from separate ones"):
        deviation(CausalLM(module, tokenizer=None))


@pytest.mark.invariant("AR-INV-203")
def test_a_changed_weight_is_found():
    model = CausalLM(paged(copy.deepcopy(qwen3())), tokenizer=None)
    reference = gate.reference_logits(model)
    with torch.no_grad():
        model.module.model.layers[2].self_attn.v_proj.weight.mul_(1.5)
    with pytest.raises(UnsupportedCombinationError, match="differ from separate ones"):
        deviation(model, reference)


@pytest.mark.invariant("AR-INV-203")
def test_a_layer_that_attends_twice_is_refused():
    module = paged(copy.deepcopy(qwen3()))
    module.model.layers[1].self_attn = CallingTwice(module.model.layers[1].self_attn)
    with pytest.raises(UnsupportedCombinationError, match="layers 1 call it more than once"):
        CausalLM(module, tokenizer=None)


@pytest.mark.invariant("AR-INV-203")
def test_a_layer_that_hides_its_window_is_refused():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    sliding = {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds}
    module = paged(loud(Qwen3Config(**COMMON, **sliding)))
    module.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(UnsupportedCombinationError, match="layer 1 slides"):
        CausalLM(module, tokenizer=None)


def test_attention_is_the_runtimes_own_again_after_the_reference():
    model = CausalLM(paged(qwen3()), tokenizer=None)
    gate.reference_logits(model)
    assert model.module.config._attn_implementation == NAME
    assert deviation(model) < 1e-5
