"""Joint attention gives what the unmodified transformer gives, for each sample as if alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName

from omnistage.attention.joint import (
    JointAttentionProcessor,
    RealFrequencies,
    install_joint_attention,
)
from omnistage.attention.joint_op import joint_attention
from omnistage.contracts.errors import UnsupportedCombinationError
from tests.attention.qwen_blocks import alone, inputs, text_lengths, transformer

TOLERANCE = 1e-5
LENGTHS = (9, 3, 3, 7)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def original() -> Any:
    return transformer()


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "apart"])
def ours(request: pytest.FixtureRequest) -> Any:
    model = transformer()
    install_joint_attention(model, fuse=request.param)
    return model


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.abs().mean() > 0.05
    return float((found - expected).abs().max())


def each_alone(model: Any, given: dict[str, Any], lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([model(**alone(given, row, n))[0] for row, n in enumerate(lengths)])


@pytest.mark.invariant("ATTN-INV-003")
@pytest.mark.parametrize("lengths", [(5,), (5, 5, 5)])
def test_equal_lengths_give_what_the_library_gives(
    original: Any, ours: Any, lengths: tuple[int, ...]
) -> None:
    given = inputs(lengths)
    assert deviation(ours(**given)[0], original(**given)[0]) <= TOLERANCE


@pytest.mark.invariant("ATTN-INV-003")
@pytest.mark.parametrize("width", [9, 12])
def test_unequal_lengths_give_what_each_gives_alone(original: Any, ours: Any, width: int) -> None:
    given = inputs(LENGTHS, width=width)
    expected = each_alone(original, given, LENGTHS)
    assert deviation(ours(**given, **text_lengths(*LENGTHS))[0], expected) <= TOLERANCE


@pytest.mark.parametrize("wrong", [(8, 3, 3, 7), (9, 4, 3, 7)])
def test_a_wrong_length_is_seen(original: Any, ours: Any, wrong: tuple[int, ...]) -> None:
    given = inputs(LENGTHS)
    expected = each_alone(original, given, LENGTHS)
    assert deviation(ours(**given, **text_lengths(*wrong))[0], expected) > 100 * TOLERANCE


@pytest.mark.invariant("ATTN-INV-004")
def test_padding_reaches_nothing_valid(ours: Any) -> None:
    given = inputs(LENGTHS)
    clean = ours(**given, **text_lengths(*LENGTHS))[0]
    for row, length in enumerate(LENGTHS):
        given["encoder_hidden_states"][row, length:] = torch.nan
    assert deviation(ours(**given, **text_lengths(*LENGTHS))[0], clean) == 0


def test_padding_rows_of_the_output_are_zeros() -> None:
    q = torch.randn(2, 4, 64)
    text = torch.randn(2, 3, 64)
    text[0, 1:] = torch.nan
    lengths = torch.tensor([1, 3])
    _, found = joint_attention([q, q, q], [text, text, text], [], [], lengths, 32, 0.0, "")
    assert torch.equal(found[0, 1:], torch.zeros(2, 64))
    assert found[0, 0].abs().mean() > 0.05
    assert found[1].abs().mean() > 0.05


@pytest.mark.invariant("ATTN-INV-005")
def test_a_mask_gives_the_original_result_bit_for_bit(original: Any, ours: Any) -> None:
    given = inputs(LENGTHS)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    expected = original(**given, encoder_hidden_states_mask=mask)[0]
    assert deviation(ours(**given, encoder_hidden_states_mask=mask)[0], expected) == 0
    with pytest.raises(ValueError, match="one of them"):
        ours(**given, encoder_hidden_states_mask=mask, **text_lengths(*LENGTHS))


@pytest.mark.invariant("ATTN-INV-006")
def test_undo_restores_what_was_there(original: Any) -> None:
    model = transformer()
    before = dict(model.attn_processors)
    undo = install_joint_attention(model)
    assert {type(each) for each in model.attn_processors.values()} == {JointAttentionProcessor}
    undo()
    assert model.attn_processors == before
    assert not model.pos_embed._forward_hooks
    given = inputs((4, 4))
    assert deviation(model(**given)[0], original(**given)[0]) == 0


def test_what_it_cannot_replace_is_refused() -> None:
    model = transformer()
    install_joint_attention(model)
    with pytest.raises(UnsupportedCombinationError, match="uses JointAttentionProcessor"):
        install_joint_attention(model)


@pytest.mark.parametrize(
    ("lengths", "error"),
    [
        (torch.tensor([9, 3, 3]), r"shape \(4,\)"),
        (torch.tensor(LENGTHS, dtype=torch.int32), "int64"),
        (torch.tensor([10, 3, 3, 7]), "between 0 and 9"),
        (torch.tensor([-1, 3, 3, 7]), "between 0 and 9"),
    ],
)
def test_lengths_that_cannot_be_are_refused(ours: Any, lengths: torch.Tensor, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ours(**inputs(LENGTHS), attention_kwargs={"text_lengths": lengths})


def without_norm(model: Any) -> None:
    for block in model.transformer_blocks:
        block.attn.norm_added_k = None


def with_hooked_norm(model: Any) -> None:
    model.transformer_blocks[1].attn.norm_q.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        ({}, without_norm),
        ({}, with_hooked_norm),
        ({"attention_head_dim": 24, "axes_dims_rope": (4, 8, 12)}, lambda model: None),
    ],
)
def test_what_the_kernel_cannot_take_stays_in_torch(
    overrides: dict[str, Any], change: Callable[[Any], None]
) -> None:
    reference, model = transformer(**overrides), transformer(**overrides)
    change(reference)
    change(model)
    install_joint_attention(model)
    assert not next(iter(model.attn_processors.values())).fused
    given = inputs(LENGTHS)
    expected = each_alone(reference, given, LENGTHS)
    assert deviation(model(**given, **text_lengths(*LENGTHS))[0], expected) <= TOLERANCE


@pytest.mark.parametrize("before_installation", [True, False])
def test_a_chosen_backend_is_used(
    monkeypatch: pytest.MonkeyPatch, before_installation: bool
) -> None:
    """`set_attention_backend` would choose for the whole process, so the mark is set by hand."""
    used: list[str | None] = []

    def record(*arguments: Any, backend: str | None, **others: Any) -> torch.Tensor:
        used.append(backend)
        return dispatch(*arguments, backend=backend, **others)

    dispatch = attention_dispatch.dispatch_attention_fn
    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", record)
    model = transformer()
    if not before_installation:
        install_joint_attention(model)
    for processor in model.attn_processors.values():
        processor._attention_backend = AttentionBackendName._NATIVE_MATH
    if before_installation:
        install_joint_attention(model)
    model(**inputs((4,)))
    assert used == ["_native_math"] * len(model.transformer_blocks)


def test_frequencies_are_kept_within_a_bound() -> None:
    model = transformer()
    hook = RealFrequencies()
    model.pos_embed.register_forward_hook(hook, with_kwargs=True)

    def frequencies(tokens: int) -> tuple[torch.Tensor, ...]:
        shapes = [[(1, 6, 6)]]
        return model.pos_embed(shapes, max_txt_seq_len=tokens, device=torch.device("cpu"))

    first = frequencies(3)
    assert [tuple(each.shape) for each in first] == [(36, 16, 2), (3, 16, 2)]
    assert frequencies(3) is first
    for tokens in range(4, 4 + hook.max_entries):
        assert frequencies(tokens)[1].shape[0] == tokens
    assert len(hook._kept) == hook.max_entries
    assert frequencies(3) is not first


def test_the_operator_keeps_its_contract_with_torch() -> None:
    """Its schema, what it says of shapes, and that it aliases nothing."""
    stream, text = torch.randn(2, 5, 64), torch.randn(2, 3, 64)
    turns = [torch.randn(tokens, 16, 2) for tokens in (5, 3)]
    weights = [torch.randn(32) for _ in range(4)]
    given = ([stream] * 3, [text] * 3, weights, turns, torch.tensor([3, 1]), 32, 1e-6, "")
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(joint_attention, given, test_utils=checks)
