"""A prompt as the token runtime holds it: ids, media with their places, the model's own state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class MediaItem:
    """One picture, sound or video of a prompt, as the model's encoder takes it.

    `digest` names its content together with everything that changes the encoder's result; `spans`
    are the token ranges [first, last) that its features replace, in order. `tensors` are on the
    host (pixel values, mel features, grids).
    """

    kind: str
    digest: bytes
    spans: tuple[tuple[int, int], ...]
    tensors: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class PreparedPrompt:
    """What `TokenModel.prepare` makes of a request's input.

    `token_ids` are the prompt's ids, one a position; a model that is fed embeddings gives ids that
    stand for them. `cacheable`: equal ids and media digests mean equal keys and values, so blocks
    may be shared (`salt` is hashed in). `penalized`: repetition, presence and frequency penalties
    count the prompt too (repetition) or only what was generated (all of them when False).

    `conditioning_offset` is for a model whose decode steps consume streamed input: decode step k,
    from 0, may run once the request's input has brought `k + conditioning_offset` token ids, or is
    complete. None: decode steps wait for nothing.

    `own` is the model's: positions, embeddings, whatever `embed` reads again.
    """

    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()
    cacheable: bool = True
    salt: bytes = b""
    penalized: bool = True
    conditioning_offset: int | None = None
    own: dict[str, Any] = field(default_factory=dict)
