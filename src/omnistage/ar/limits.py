"""Bounds on what a request may ask of a token stage, checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    OmniTokenSamplingParams,
)

MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
_INT64 = 2**63

_RANGES: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0.0, 100.0, True, "between 0 and 100"),
    "top_p": (0.0, 1.0, False, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, True, "between 0 and 1"),
    "repetition_penalty": (0.0, 100.0, False, "above 0 and at most 100"),
    "presence_penalty": (-2.0, 2.0, True, "between -2 and 2"),
    "frequency_penalty": (-2.0, 2.0, True, "between -2 and 2"),
}
"""(least, most, least allowed itself, in words). Penalties have OpenAI's bounds."""


def check_token_params(params: OmniTokenSamplingParams, vocab_size: int | None) -> None:
    """Raises `InvalidRequestError` naming the field, its value and what is allowed. `vocab_size`
    None: token ids are only checked to be no negative numbers."""
    for name, (least, most, closed, words) in _RANGES.items():
        value = getattr(params, name)
        if value is None:
            continue
        inside = (least <= value if closed else least < value) and value <= most
        if not math.isfinite(value) or not inside:
            raise _refusal(name, value, words)
    _check_counts(params)
    _check_stops(params, vocab_size)
    _check_bias(params, vocab_size)


def _refusal(name: str, value: object, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {words}, got {value!r}", param=name)


def _check_counts(params: OmniTokenSamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise _refusal("max_tokens", params.max_tokens, "at least 1")
    if params.min_tokens < 0:
        raise _refusal("min_tokens", params.min_tokens, "0 or more")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, more than max_tokens {params.max_tokens}",
            param="min_tokens",
        )
    if params.top_k is not None and params.top_k < -1:
        raise _refusal("top_k", params.top_k, "-1 or 0 (all), or a positive number")
    if params.seed is not None and not -_INT64 <= params.seed < _INT64:
        raise _refusal("seed", params.seed, "a 64-bit integer")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise _refusal("logprobs", params.logprobs, f"between 0 and {MAX_LOGPROBS}")


def _check_stops(params: OmniTokenSamplingParams, vocab_size: int | None) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"{len(params.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed",
            param="stop",
        )
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"a stop string has {len(text)} characters; allowed are 1 to {MAX_STOP_LENGTH}",
                param="stop",
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"{len(params.stop_token_ids)} stop token ids; at most {MAX_STOP_TOKEN_IDS} are "
            "allowed",
            param="stop_token_ids",
        )
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_bias(params: OmniTokenSamplingParams, vocab_size: int | None) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(params.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are "
            "allowed",
            param="logit_bias",
        )
    check_ids("logit_bias", list(params.logit_bias), vocab_size)
    for token_id, bias in params.logit_bias.items():
        if not math.isfinite(bias) or abs(bias) > 100:
            raise InvalidRequestError(
                f"logit_bias of token {token_id} must be between -100 and 100, got {bias!r}",
                param="logit_bias",
            )


def check_ids(name: str, ids: Sequence[int], vocab_size: int | None) -> None:
    """Raises `InvalidRequestError` for ids beyond a vocabulary, where its size is known."""
    for token_id in ids:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            allowed = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
            raise InvalidRequestError(
                f"{name} names token {token_id}; token ids are {allowed}", param=name
            )


def max_output(
    params: OmniTokenSamplingParams,
    *,
    num_prompt: int,
    max_model_len: int,
    capacity: int,
    max_chunk: int | None,
    default_max_tokens: int | None,
) -> int:
    """How many tokens may follow a prompt of `num_prompt`.

    `capacity` is what the whole KV cache holds; `max_chunk` the longest prompt that one step takes,
    None where prompts are computed in parts. A `max_tokens` of the caller's own that cannot be
    reached is refused, the stage's default is cut. Raises `InvalidRequestError`.
    """
    if num_prompt == 0:
        raise InvalidRequestError("the prompt is empty; it needs at least one token")
    if num_prompt >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens; with max_model_len {max_model_len} it may have "
            f"at most {max_model_len - 1}"
        )
    if num_prompt > capacity:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens; the KV cache holds {capacity} (kv_cache_gib, "
            "gpu_memory_utilization)"
        )
    if max_chunk is not None and num_prompt > max_chunk:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens; with enable_chunked_prefill off at most "
            f"max_num_batched_tokens {max_chunk} are allowed"
        )
    room = min(max_model_len, capacity + 1) - num_prompt
    wanted = params.max_tokens
    if wanted is None or wanted <= room:
        return room if wanted is None else wanted
    if wanted == default_max_tokens:
        return room
    bound = (
        f"max_model_len is {max_model_len}"
        if max_model_len <= capacity + 1
        else f"the KV cache holds {capacity} tokens"
    )
    raise InvalidRequestError(
        f"max_tokens is {wanted}, but after a prompt of {num_prompt} tokens there is room for "
        f"{room}: {bound}",
        param="max_tokens",
    )
