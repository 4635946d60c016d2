"""Stable Diffusion 3 and 3.5 by steps (diffusers' `StableDiffusion3Pipeline`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnistage.diffusion.family import Condition, Row, StepFamily, StepRequestState, encode_by
from omnistage.diffusion.flow_schedule import set_schedule, shift_of

if TYPE_CHECKING:
    import torch

_PROMPTS = ("prompt", "prompt_2", "prompt_3")
_TEXTS = (*_PROMPTS, *(f"negative_{name}" for name in _PROMPTS))


class StableDiffusion3Steps(StepFamily):
    """Guidance by `guidance_scale` above 1, away from the negative prompt or an empty one. Texts
    are padded to fixed lengths, nothing is masked."""

    accepted = frozenset({*_TEXTS, "guidance_scale", "clip_skip"})

    def check(self, state: StepRequestState) -> None:
        given = state.arguments
        self.check_texts(given, _TEXTS)
        default = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        given["height"] = given["height"] or default
        given["width"] = given["width"] or default
        self.pipeline.check_inputs(
            **{name: given[name] for name in (*_TEXTS, "height", "width", "max_sequence_length")}
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
        pipe, given = self.pipeline, state.arguments
        embeds = state.branches[0]["embeds"]
        state.latents = pipe.prepare_latents(
            given["num_images_per_prompt"],
            pipe.transformer.config.in_channels,
            given["height"],
            given["width"],
            embeds.dtype,
            embeds.device,
            state.generator,
            given["latents"],
        )
        scheduler, shift = self.own_scheduler(state), {}
        if scheduler.config.get("use_dynamic_shifting"):
            height, width = state.latents.shape[2:]
            tokens = (height // pipe.patch_size) * (width // pipe.patch_size)
            shift["mu"] = shift_of(scheduler, tokens, max_shift=1.16)
        set_schedule(state, scheduler, embeds.device, sigmas=given["sigmas"], **shift)
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
        positive, *negative = predictions
        if not negative:
            return positive
        return negative[0] + state.arguments["guidance_scale"] * (positive - negative[0])

    def decode(self, latents: torch.Tensor, states: Sequence[StepRequestState]) -> torch.Tensor:
        config = self.pipeline.vae.config
        scaled = latents / config.scaling_factor + config.shift_factor
        picture: torch.Tensor = self.pipeline.vae.decode(scaled, return_dict=False)[0]
        return picture
