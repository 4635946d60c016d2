"""Mel spectrograms from codec ids: the sampling loop of `Qwen2_5OmniToken2WavDiTModel.sample`, with
noise of one's own, and over a window whose past is known.

A block of the transformer sees some blocks before it and one behind it. The past does not change
any more once it has been heard, so what a window needs of it is the state that each of the
solver's evaluations saw: with that a window goes on as if the past were part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from omnistage.models.qwen2_5_omni.codes import SpeechSettings


def blocks_seen_before(config: Any) -> int:
    """Of a `Qwen2_5OmniDiTConfig`: how many blocks back one evaluation reaches."""
    return len(set(config.look_backward_layers))


class Velocity:
    """The right-hand side of the solver's equation for B windows of n frames, guided.

    past (B, evaluations, p, mel_dim) are the states of the p frames before the window, by
    evaluation; `between` is called before each. codes (B, (p + n) / repeats) int64; conditions
    (B, enc_emb_dim); references (B, m, mel_dim). `seen` are the window's states, as they come.
    """

    def __init__(
        self,
        module: Any,
        codes: torch.Tensor,
        conditions: torch.Tensor,
        references: torch.Tensor,
        past: torch.Tensor,
        settings: SpeechSettings,
        between: Callable[[], None],
    ) -> None:
        self.seen: list[torch.Tensor] = []
        self._module = module
        self._between = between
        self._codes = codes
        self._past = past
        self._guidance = settings.guidance_scale
        self._references = references
        frames = codes.shape[1] * module.repeats
        self._conditions = conditions.unsqueeze(1).repeat(1, frames, 1)

    def __call__(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        import torch

        self._between()
        known = self._past.shape[2]
        whole = state
        if known:
            whole = torch.cat((self._past[:, len(self.seen)], state), dim=1)
        self.seen.append(state)
        guided = self._guidance >= 1e-5  # The library's own bound.
        found = self._module(
            hidden_states=whole,
            speaker_embedding=self._conditions,
            condition_vector=self._references,
            quantized_code=self._codes,
            time_step=time,
            apply_cfg=guided,
        )
        if guided:
            with_codes, without = torch.chunk(found, 2, dim=0)
            found = with_codes + (with_codes - without) * self._guidance
        return found[:, known:]


def num_evaluations(settings: SpeechSettings) -> int:
    """Four a step of the solver."""
    return 4 * (settings.num_steps - 1)


def solve(
    velocity: Velocity, noise: torch.Tensor, settings: SpeechSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """From noise (B, n, mel_dim) to the spectrograms (B, n, mel_dim), and the states that the
    evaluations saw, (B, evaluations, n, mel_dim)."""
    import torch
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

    times = torch.linspace(0, 1, settings.num_steps, device=noise.device, dtype=noise.dtype)
    if settings.sway_coefficient is not None:
        times += settings.sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
    solution = RungeKutta4ODESolver(function=velocity, initial_value=noise).integrate(times)
    return solution[-1], torch.stack(velocity.seen, dim=1)
