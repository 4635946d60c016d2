"""Logprobs as they leave a token stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omnistage.ar.step import TokenLogprobs

TokenBytes = Callable[[Any, int], bytes]
"""(tokenizer, id) → the bytes that this token adds to a text."""


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    from omnistage.ar import detokenizer

    return detokenizer.token_bytes(tokenizer, token_id)


def logprob_entry(
    tokenizer: Any, token_id: int, found: TokenLogprobs, bytes_of: TokenBytes = token_bytes
) -> dict[str, Any]:
    """One sampled token: "token_id", "token", "bytes", "logprob", "rank", and "top", the most
    likely ones in the same shape. Without a tokenizer "token" is the id and there are no bytes."""

    def entry(one: int, logprob: float, rank: int) -> dict[str, Any]:
        raw = b"" if tokenizer is None else bytes_of(tokenizer, one)
        text = str(one) if tokenizer is None else raw.decode(errors="replace")
        known = {"token_id": one, "token": text, "bytes": list(raw)}
        return {**known, "logprob": logprob, "rank": rank}

    top = [entry(one, logprob, rank) for rank, (one, logprob) in enumerate(found.top, start=1)]
    return {**entry(token_id, found.logprob, found.rank), "top": top}
