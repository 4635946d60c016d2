"""Joined projections give what the projections gave, whoever calls them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from omnistage.ar.fusion import FollowingLinear, fuse_projections, replace_linears

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def model_of(config_class: type) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**SHAPE)).eval()


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_a_model_says_the_same_with_joined_projections(config_class: type) -> None:
    model = model_of(config_class)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # Far from zero, biases too.
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = model(ids).logits
        assert fuse_projections(model) == 2 * SHAPE["num_hidden_layers"]
        assert replace_linears(model, nn.functional.linear) == 2 * 2 + 1
        got = model(ids).logits
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        weight = model.model.layers[1].mlp.gate_proj.weight
        weight.copy_(weight.roll(1, 0))
        assert (model(ids).logits - expected).abs().max() > 1e-3, "the weights do not matter"


def test_shared_and_uneven_siblings_stay() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4, bias=b) for b in (1, 1, 0))
            self.gate_proj, self.up_proj = nn.Linear(4, 4), nn.Linear(4, 4)
            self.up_proj.weight = self.gate_proj.weight

    odd = Odd()
    assert fuse_projections(odd) == 0
    assert type(odd.up_proj) is nn.Linear


def test_a_follower_called_first_says_so() -> None:
    model = model_of(LlamaConfig)
    fuse_projections(model)
    follower = model.model.layers[0].mlp.up_proj
    assert isinstance(follower, FollowingLinear)
    with pytest.raises(RuntimeError, match="before the one that leads it"):
        follower(torch.ones(1, 32))
