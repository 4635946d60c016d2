"""Logprobs as they leave a token stage."""

from __future__ import annotations

from typing import Any

from omnistage.ar.step import TokenLogprobs


def logprob_entry(tokenizer: Any, token_id: int, found: TokenLogprobs) -> dict[str, Any]:
    """One sampled token: "token_id", "token", "bytes", "logprob", "rank", and "top", the most
    likely ones in the same shape. Without a tokenizer "token" is the id and there are no bytes."""
    top = [
        _entry(tokenizer, one, logprob, rank)
        for rank, (one, logprob) in enumerate(found.top, start=1)
    ]
    return {**_entry(tokenizer, token_id, found.logprob, found.rank), "top": top}


def _entry(tokenizer: Any, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    text = str(token_id) if tokenizer is None else tokenizer.decode([token_id])
    raw = [] if tokenizer is None else list(text.encode())
    return {"token_id": token_id, "token": text, "bytes": raw, "logprob": logprob, "rank": rank}
