"""Stable Diffusion 3 and 3.5 by steps (diffusers' `StableDiffusion3Pipeline`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import InvalidRequestError
from omnistage.diffusion.family import Condition, Row, StepRequestState
from omnistage.diffusion.flow_family import FlowFamily, encode_by, shift_of

if TYPE_CHECKING:
    import torch

_PROMPTS = ("prompt", "prompt_2", "prompt_3")


class StableDiffusion3Steps(FlowFamily):
    """Guidance by `guidance_scale` above 1, away from the negative prompt or an empty one. Texts
    are padded to fixed lengths, nothing is masked."""

    texts = (*_PROMPTS, *(f"negative_{name}" for name in _PROMPTS))
    accepted = frozenset({*texts, "guidance_scale", "clip_skip"})

    def check_call(self, given: Mapping[str, Any]) -> None:
        super().check_call(given)
        if not isinstance(given["clip_skip"], int | None):
            raise InvalidRequestError(
                f"clip_skip must be an integer, got {given['clip_skip']!r}", param="clip_skip"
            )

    def conditions(self, state: StepRequestState) -> list[dict[str, Any]]:
        given = state.arguments
        positive = {name: given[name] or given["prompt"] for name in _PROMPTS}
        wanted = [{**positive, "clip_skip": given["clip_skip"]}]
        if given["guidance_scale"] > 1:
            text = given["negative_prompt"] or ""
            negative = {name: given[f"negative_{name}"] or text for name in _PROMPTS}
            wanted.append({**negative, "clip_skip": None})
        return [{**one, "max_sequence_length": given["max_sequence_length"]} for one in wanted]

    def encode(self, prompts: Sequence[dict[str, Any]]) -> list[Condition]:
        return encode_by(prompts, _PROMPTS, self._encode)

    def _encode(self, **arguments: Any) -> dict[str, torch.Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            **arguments, do_classifier_free_guidance=False
        )
        return {"embeds": embeds, "pooled": pooled}

    def prepare(self, state: StepRequestState) -> None:
        self.start(state, self.module.config.in_channels)
        state.scheduler = self.own_scheduler(state)
        shift: dict[str, float] = {}
        if state.scheduler.config.get("use_dynamic_shifting"):
            height, width = (size // self.pipeline.patch_size for size in state.latents.shape[2:])
            shift["mu"] = shift_of(state.scheduler, height * width, max_shift=1.16)
        self.schedule(state, state.arguments["sigmas"], **shift)
        embeds = state.branches[0]["embeds"]
        state.forward_key = (embeds.shape[1], embeds.dtype)

    def static_inputs(self, rows: Sequence[Row]) -> dict[str, Any]:
        import torch

        return {
            "encoder_hidden_states": torch.cat([row.condition["embeds"] for row in rows]),
            "pooled_projections": torch.cat([row.condition["pooled"] for row in rows]),
        }

    def moving_inputs(self, latents: torch.Tensor, timesteps: torch.Tensor) -> dict[str, Any]:
        return {"hidden_states": latents, "timestep": timesteps}

    def guide(self, state: StepRequestState, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.combine(predictions, state.arguments["guidance_scale"])

    def decode(self, latents: torch.Tensor, states: Sequence[StepRequestState]) -> torch.Tensor:
        return self.decode_scaled(latents)
