"""How the codes behind a frame's first are chosen: greedily where the talker is greedy, else drawn
with the code predictor's own settings, which `transformers` fixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omnistage.ar.sampling.filters import ordered_threshold
from omnistage.ar.sampling.random import exponential_noise, signed_seed, step_keys, token_hashes

if TYPE_CHECKING:
    import torch

    from omnistage.ar.model import RunningSequence
    from omnistage.models.qwen3_omni.code_predictor import Choose

TOP_K = 50
TOP_P = 0.8
"""`Qwen3OmniMoeTalkerForConditionalGeneration.prepare_inputs_for_generation`."""

SEED_MARK = 0x5EED_C0DE
"""Keeps these draws apart from those of the talker's own tokens."""


class CodeSampling:
    """By device row: whether it samples, and its seed. Draws follow from (seed, decode step, code
    group) alone."""

    def __init__(self, rows: int, num_codes: int, groups: int, device: Any) -> None:
        import torch

        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._samples = torch.zeros(rows, dtype=torch.bool, device=device)
        self._hashes = token_hashes(num_codes, device)
        self._groups = groups
        self._choose = choose_codes

    def begin(self, sequence: RunningSequence) -> None:
        self._seeds[sequence.row] = signed_seed(sequence.seed ^ SEED_MARK)
        self._samples[sequence.row] = sequence.params.temperature != 0

    def of_rows(self, rows: torch.Tensor, steps: torch.Tensor) -> Choose:
        """For the frames that `rows` (S,) make in decode steps `steps` (S,). Capturable."""
        import torch

        samples = self._samples[rows]
        places = torch.arange(self._groups, device=steps.device)
        seeds = self._seeds[rows].unsqueeze(1).expand(-1, self._groups)
        keys = step_keys(seeds, steps.unsqueeze(1) * self._groups + places)

        def choose(logits: torch.Tensor, group: int) -> torch.Tensor:
            return self._choose(logits, keys[:, group], samples, self._hashes)

        return choose

    def fuse(self) -> None:
        """Compile the choice: some ten kernels of tiny work become a few."""
        import torch

        self._choose = torch.compile(choose_codes, fullgraph=True)


def choose_codes(
    logits: torch.Tensor, keys: torch.Tensor, samples: torch.Tensor, hashes: torch.Tensor
) -> torch.Tensor:
    """logits (S, V) float32, keys (S,) int64 of each row's draw, samples (S,) bool → codes (S,)
    int64: drawn where a row samples, else the most likely."""
    import torch

    weights = _weights(logits)
    drawn = (weights / exponential_noise(keys, hashes)).argmax(-1)
    return torch.where(samples, drawn, logits.argmax(-1))


def _weights(logits: torch.Tensor) -> torch.Tensor:
    """(S, V): what is left of the probabilities, not normalized."""
    import torch

    count = min(TOP_K, logits.shape[1])
    ordered = logits.topk(count).values
    shift = ordered[:, :1]
    top_k = torch.full_like(shift[:, 0], count, dtype=torch.int64)
    top_p = torch.full_like(shift[:, 0], TOP_P)
    threshold = ordered_threshold(ordered - shift, top_k, top_p)
    scaled = logits - shift
    return torch.where(scaled >= threshold.unsqueeze(1), scaled.exp(), 0.0)
