"""q, k and v from one product: the same numbers, the same memory, and a way back."""

from __future__ import annotations

import pytest
import torch

from omnistage.attention.joint import install_joint_attention
from omnistage.attention.joint_projections import FUSED, FusedProjections, can_fuse_projections
from tests.attention.qwen_blocks import inputs, text_lengths, transformer

LENGTHS = (9, 3, 7)


def run(model):
    given = inputs(LENGTHS)
    with torch.no_grad():
        return model(**given, **text_lengths(*LENGTHS))[0]


@pytest.mark.invariant("ATTN-INV-010")
def test_one_product_gives_what_three_give_and_is_undone():
    model, plain = transformer(), transformer()
    undo_plain = install_joint_attention(plain, fuse=False)
    expected = run(plain)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    undo = install_joint_attention(model, fuse=True)
    assert all(block.attn.fused_projections for block in model.transformer_blocks)
    found = run(model)
    assert expected.abs().mean() > 0.05
    assert float((found - expected).abs().max()) <= 1e-5
    undo()
    undo_plain()
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    attn = model.transformer_blocks[0].attn
    places = {part.weight.untyped_storage().data_ptr() for part in (attn.to_q, attn.to_k)}
    assert len(places) == 2, "each has memory of its own again"


@pytest.mark.invariant("ATTN-INV-010")
def test_the_three_are_views_of_the_one_and_stay_the_same_parameters():
    model = transformer()
    attn = model.transformer_blocks[0].attn
    parameters = {name: getattr(attn, name).weight for names in FUSED.values() for name in names}
    fused = FusedProjections([attn])
    assert len(fused) == 1
    for fused_name, names in FUSED.items():
        whole = getattr(attn, fused_name).weight
        for name in names:
            weight = getattr(attn, name).weight
            assert weight is parameters[name]
            assert weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    x = torch.randn(2, 5, attn.to_q.in_features)
    three = torch.cat([attn.to_q(x), attn.to_k(x), attn.to_v(x)], dim=-1)
    torch.testing.assert_close(attn.to_qkv(x), three, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        attn.to_k.weight.add_(1.0)
    assert not torch.allclose(attn.to_qkv(x), three), "a change of a part is one of the whole"
    fused.undo()
    fused.undo()


def test_layers_that_something_hangs_on_are_left_alone():
    attn = transformer().transformer_blocks[0].attn
    handle = attn.to_k.register_forward_hook(lambda *given: None)
    assert not can_fuse_projections(attn)
    assert len(FusedProjections([attn])) == 0
    handle.remove()
    assert can_fuse_projections(attn)
    attn.to_v = torch.nn.Linear(attn.to_v.in_features, attn.to_v.out_features, bias=False)
    assert not can_fuse_projections(attn)
