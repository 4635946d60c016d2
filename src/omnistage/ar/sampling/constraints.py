"""What changes logits before anything is drawn: bias, forbidden stops, grammars, penalties.

Each takes logits (R, V) float32 and returns such; none writes into what it was given. A logit of
-inf stays -inf through all of them.
"""

from __future__ import annotations

import torch

FORBIDDEN = float("-inf")
BITS = 32


def add_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """ids (R, B) int64, values (R, B) float32; unused places hold id 0 and value 0."""
    return logits.scatter_add(1, ids, values)


def forbid_stops(
    logits: torch.Tensor, stop_ids: torch.Tensor, is_stop: torch.Tensor, early: torch.Tensor
) -> torch.Tensor:
    """Rows that are `early` (R,) may not sample their stop ids (R, S); `is_stop` (R, S) marks the
    places in use."""
    penalty = torch.where(is_stop & early.unsqueeze(1), FORBIDDEN, 0.0)
    return logits.scatter_add(1, stop_ids, penalty)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """bitmask (R, ceil(V / 32)) int32: bit i of word w allows token 32 w + i."""
    shifts = torch.arange(BITS, dtype=torch.int32, device=bitmask.device)
    bits = (bitmask.unsqueeze(2) >> shifts) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    return torch.where(allowed, logits, FORBIDDEN)


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """in_prompt (R, V) bool, counts (R, V) int32 of generated tokens, the rest (R,) float32.

    Repetition as in `transformers` (CTRL, Keskar et al. 2019), over prompt and generated tokens;
    presence and frequency as OpenAI defines them, over generated tokens only.
    """
    repetition = repetition.unsqueeze(1)
    generated = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | generated, scaled, logits)
    logits = logits - frequency.unsqueeze(1) * counts
    return logits - presence.unsqueeze(1) * generated
