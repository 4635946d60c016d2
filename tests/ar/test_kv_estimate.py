"""What plans say of keys and values, against what layers are observed to keep."""

from __future__ import annotations

import pytest

from omnistage.ar.causal_lm import CausalLM
from omnistage.ar.kv_estimate import kv_bytes_per_token
from omnistage.attention.paged import NAME, register
from omnistage.memory.causal_lm import load_causal_lm
from tests.checkpoints import TOKEN_FAMILIES, checkpoint

SERVED = [
    name
    for name, family in TOKEN_FAMILIES.items()
    if not family.gate and family.architecture.endswith("ForCausalLM")
]


@pytest.mark.parametrize("family", SERVED)
def test_the_estimate_is_what_the_layers_keep(family):
    register()
    module, plan = load_causal_lm(checkpoint(family), attn_implementation=NAME)
    kept = sum(layer.token_bytes(4) for layer in CausalLM(module, tokenizer=None).layers)
    assert kv_bytes_per_token(plan.skeleton.config, "float32") == kept
    assert kv_bytes_per_token(plan.skeleton.config, "bfloat16") == kept // 2
