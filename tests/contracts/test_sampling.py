"""Sampling parameters: round trips and defaults."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import (
    GenericParams,
    OmniDiffusionSamplingParams,
    OmniTokenSamplingParams,
    SamplingParams,
    merge_defaults,
)
from tests.contracts.strategies import structs

CLASSES = (OmniDiffusionSamplingParams, OmniTokenSamplingParams, GenericParams)


@pytest.mark.invariant("IO-INV-200")
@pytest.mark.parametrize("cls", CLASSES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_round_trip_changes_nothing(cls: type[msgspec.Struct], data: Any) -> None:
    params = data.draw(structs(cls))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert type(again) is cls
    assert again == params


@pytest.mark.invariant("IO-INV-201")
@pytest.mark.parametrize("cls", CLASSES)
def test_unknown_parameters_are_refused(cls: type[msgspec.Struct]) -> None:
    plain = msgspec.to_builtins(cls()) | {"surprise": 1}
    with pytest.raises(msgspec.ValidationError, match="unknown field `surprise`"):
        msgspec.convert(plain, SamplingParams)


@pytest.mark.invariant("IO-INV-102")
def test_defaults_fill_only_what_is_open() -> None:
    asked = OmniDiffusionSamplingParams(height=64, extra_args={"a": 1})
    merged = merge_defaults(
        asked, {"height": 128, "width": 32, "extra_args": {"a": 2, "b": 3}, "seed": 7}
    )
    assert merged == OmniDiffusionSamplingParams(
        height=64, width=32, seed=7, extra_args={"a": 1, "b": 3}
    )
    assert asked == OmniDiffusionSamplingParams(height=64, extra_args={"a": 1})


@pytest.mark.invariant("IO-INV-102")
def test_falsy_values_of_the_caller_win() -> None:
    asked = OmniDiffusionSamplingParams(guidance_scale=0.0, seed=0, vae_tiling=False)
    merged = merge_defaults(asked, {"guidance_scale": 5.0, "seed": 9, "vae_tiling": True})
    assert merged == asked


@pytest.mark.invariant("IO-INV-102")
def test_a_default_that_names_nothing_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="'hight' does not exist"):
        merge_defaults(OmniDiffusionSamplingParams(), {"hight": 1})


@pytest.mark.invariant("IO-INV-102")
@given(params=structs(OmniTokenSamplingParams))
@settings(max_examples=30, deadline=None)
def test_merging_nothing_changes_nothing(params: OmniTokenSamplingParams) -> None:
    assert merge_defaults(params, {}) == params


def test_tensor_fields_exist() -> None:
    names = {field.name for field in msgspec.structs.fields(OmniDiffusionSamplingParams)}
    assert set(OmniDiffusionSamplingParams.TENSOR_FIELDS) <= names


def test_steps_of_the_caller_win_over_a_quality() -> None:
    given = OmniDiffusionSamplingParams(quality="high", num_inference_steps=3)
    assert merge_defaults(given, {}).quality is None
    assert merge_defaults(given, {"num_inference_steps": 8}).num_inference_steps == 3
    merged = merge_defaults(given, {"num_inference_steps": 8, "quality": "low"})
    assert (merged.num_inference_steps, merged.quality) == (3, None)


@pytest.mark.invariant("IO-INV-102")
@pytest.mark.parametrize("quality", ["low", "auto", "high", None])
def test_merging_defaults_twice_is_merging_them_once(quality: str | None) -> None:
    """The engine merges them, and the stage's queue again."""
    defaults = {"num_inference_steps": 8, "height": 16}
    once = merge_defaults(OmniDiffusionSamplingParams(quality=quality), defaults)
    steps = {"low": 4, "auto": 8, "high": 16, None: 8}[quality]
    assert (once.num_inference_steps, once.quality) == (steps, None)
    assert merge_defaults(once, defaults) == once
    later = merge_defaults(OmniDiffusionSamplingParams(quality=quality), {"height": 16})
    assert later.quality == quality, "the pipeline's own number of steps is scaled later"


def test_an_unknown_quality_is_refused_where_it_would_be_spent() -> None:
    with pytest.raises(InvalidRequestError, match="quality must be one of"):
        merge_defaults(OmniDiffusionSamplingParams(quality="best"), {"num_inference_steps": 8})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_inference_steps": "many"}, "num_inference_steps is 'many': expected int"),
        ({"seed": 1.5}, "seed is 1.5: expected int"),
        ({"seed": True}, "seed is True: expected int"),
        ({"sigmas": ["a"]}, "sigmas is ['a']: expected float"),
        ({"extra_args": 3}, "extra_args is 3: expected object"),
        ({"partial_images": 4}, "partial_images is 4: expected int <= 3"),
        ({"partial_images": -1}, "partial_images is -1: expected int >= 0"),
    ],
)
@pytest.mark.parametrize("defaults", [{}, {"height": 64}])
def test_a_wrong_value_is_refused_before_it_is_sent(
    wrong: dict[str, Any], words: str, defaults: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        merge_defaults(OmniDiffusionSamplingParams(**wrong), defaults)
    assert caught.value.message.startswith(words)
    assert caught.value.param == next(iter(wrong))


def test_integers_pass_for_floats_and_tensors_for_anything() -> None:
    tensor = object()
    params = OmniDiffusionSamplingParams(
        guidance_scale=3,
        latents=tensor,
        extra_args={"x": tensor},  # type: ignore[arg-type]
    )
    merged = merge_defaults(params, {"height": 64})
    assert isinstance(merged, OmniDiffusionSamplingParams)
    assert merged.latents is tensor
    assert merged.extra_args == {"x": tensor}
