"""Parameters that a token stage refuses, with the limit named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from omnistage.ar.limits import check_token_params, max_output
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, OmniTokenSamplingParams

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": math.nan}, "temperature", "between 0 and 100, got nan"),
    ({"temperature": -0.1}, "temperature", "between 0 and 100, got -0.1"),
    ({"temperature": math.inf}, "temperature", "got inf"),
    ({"top_p": 0.0}, "top_p", "above 0 and at most 1"),
    ({"top_p": 1.1}, "top_p", "above 0 and at most 1"),
    ({"min_p": -1.0}, "min_p", "between 0 and 1"),
    ({"top_k": -2}, "top_k", "-1 or 0 (all)"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
    ({"presence_penalty": 2.5}, "presence_penalty", "between -2 and 2"),
    ({"frequency_penalty": math.nan}, "frequency_penalty", "between -2 and 2"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"min_tokens": -1}, "min_tokens", "0 or more"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens 4"),
    ({"seed": 2**63}, "seed", "64-bit"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs", f"between 0 and {MAX_LOGPROBS}"),
    ({"stop": ["x"] * 10_000}, "stop", "10000 stop strings; at most 64"),
    ({"stop": [""]}, "stop", "0 characters; allowed are 1 to"),
    ({"stop": ["x" * 2000]}, "stop", "2000 characters"),
    ({"stop_token_ids": [100]}, "stop_token_ids", "token ids are 0 to 99"),
    ({"stop_token_ids": [1] * 5000}, "stop_token_ids", "at most 1024"),
    ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias", f"at most {MAX_LOGIT_BIAS}"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "names token -1"),
    ({"logit_bias": {1: 101.0}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {1: math.nan}}, "logit_bias", "between -100 and 100"),
]


@pytest.mark.invariant("AR-INV-104")
@pytest.mark.parametrize(("params", "name", "words"), REFUSED)
def test_what_is_out_of_bounds_is_refused_by_name(
    params: dict[str, Any], name: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_token_params(OmniTokenSamplingParams(**params), 100)
    assert caught.value.param == name
    assert words in caught.value.message


def test_what_is_within_bounds_passes() -> None:
    check_token_params(
        OmniTokenSamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            repetition_penalty=1.1,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            max_tokens=1,
            min_tokens=1,
            seed=-1,
            logprobs=0,
            stop=["x"],
            stop_token_ids=[99],
            logit_bias={0: -100.0},
        ),
        100,
    )
    check_token_params(OmniTokenSamplingParams(stop_token_ids=[10**6]), None)


def room(num_prompt: int, max_tokens: int | None = None, **changes: Any) -> int:
    return max_output(
        OmniTokenSamplingParams(max_tokens=max_tokens),
        num_prompt=num_prompt,
        **{
            "max_model_len": 100,
            "capacity": 80,
            "max_chunk": None,
            "default_max_tokens": None,
            **changes,
        },
    )


@pytest.mark.invariant("AR-INV-104")
def test_how_much_may_follow_a_prompt() -> None:
    assert room(10, 5) == 5
    assert room(10) == 71, "the last token is never written"
    assert room(10, capacity=1000) == 90
    assert room(10, 500, default_max_tokens=500) == 71
    assert room(80) == 1
    for kwargs, words in [
        ({"num_prompt": 0}, "the prompt is empty"),
        ({"num_prompt": 100}, "max_model_len 100 it may have at most 99"),
        ({"num_prompt": 81}, "the KV cache holds 80"),
        ({"num_prompt": 40, "max_chunk": 32}, "at most max_num_batched_tokens 32"),
        ({"num_prompt": 10, "max_tokens": 72}, "there is room for 71: the KV cache holds 80"),
        ({"num_prompt": 10, "max_tokens": 91, "capacity": 999}, "max_model_len is 100"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            room(**kwargs)
        assert words in caught.value.message
