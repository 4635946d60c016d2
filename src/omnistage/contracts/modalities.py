"""What a piece of data is. Nothing crosses a boundary without saying so."""

from __future__ import annotations

from enum import StrEnum


class Modality(StrEnum):
    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    ACTION = "action"
    TOKENS = "tokens"
    """Token or codec ids between stages."""
    HIDDEN = "hidden"
    """Hidden states, embeddings or KV between stages."""
    LATENT = "latent"
    """Latents of a diffusion model."""
