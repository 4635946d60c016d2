"""Flux.1 by steps (diffusers' `FluxPipeline`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnistage.diffusion.family import Condition, Row, StepFamily, StepRequestState, encode_by
from omnistage.diffusion.flow_schedule import even_sigmas, set_schedule, shift_of

if TYPE_CHECKING:
    import torch

_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")


class FluxSteps(StepFamily):
    """Guidance by an input of the model where it is distilled, and by `true_cfg_scale` with a
    negative prompt. Texts are padded to `max_sequence_length`, nothing is masked."""

    accepted = frozenset({"prompt_2", "negative_prompt_2", "true_cfg_scale", "guidance_scale"})

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
        kinds = [""]
        if given["true_cfg_scale"] > 1 and given["negative_prompt"] is not None:
            kinds.append("negative_")
        return [
            {
                "prompt": given[f"{kind}prompt"],
                "prompt_2": given[f"{kind}prompt_2"] or given[f"{kind}prompt"],
                "max_sequence_length": given["max_sequence_length"],
            }
            for kind in kinds
        ]

    def encode(self, prompts: Sequence[dict[str, Any]]) -> list[Condition]:
        return encode_by(prompts, ("prompt", "prompt_2"), self._encode)

    def _encode(self, **arguments: Any) -> dict[str, torch.Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(**arguments)
        return {"embeds": embeds, "pooled": pooled}

    def prepare(self, state: StepRequestState) -> None:
        pipe, given = self.pipeline, state.arguments
        embeds = state.branches[0]["embeds"]
        state.latents, state.extra["img_ids"] = pipe.prepare_latents(
            given["num_images_per_prompt"],
            pipe.transformer.config.in_channels // 4,
            given["height"],
            given["width"],
            embeds.dtype,
            embeds.device,
            state.generator,
            given["latents"],
        )
        scheduler = self.own_scheduler(state)
        sigmas = None if scheduler.config.get("use_flow_sigmas") else even_sigmas(state)
        mu = shift_of(scheduler, state.latents.shape[1])
        set_schedule(state, scheduler, embeds.device, sigmas=sigmas, mu=mu)
        scheduler.set_begin_index(0)
        state.forward_key = (given["height"], given["width"], embeds.shape[1], embeds.dtype)

    def static_inputs(self, rows: Sequence[Row]) -> dict[str, Any]:
        import torch

        embeds = torch.cat([row.condition["embeds"] for row in rows])
        guidance = None
        if self.pipeline.transformer.config.guidance_embeds:
            scales = [row.state.arguments["guidance_scale"] for row in rows]
            guidance = torch.tensor(scales, device=embeds.device, dtype=torch.float32)
        return {
            "encoder_hidden_states": embeds,
            "pooled_projections": torch.cat([row.condition["pooled"] for row in rows]),
            "guidance": guidance,
            "txt_ids": embeds.new_zeros(embeds.shape[1], 3),
            "img_ids": rows[0].state.extra["img_ids"],
        }

    def moving_inputs(self, latents: torch.Tensor, timesteps: torch.Tensor) -> dict[str, Any]:
        return {"hidden_states": latents, "timestep": timesteps.to(latents.dtype) / 1000}

    def guide(self, state: StepRequestState, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        positive, *negative = predictions
        if not negative:
            return positive
        return negative[0] + state.arguments["true_cfg_scale"] * (positive - negative[0])

    def decode(self, latents: torch.Tensor, states: Sequence[StepRequestState]) -> torch.Tensor:
        pipe, given = self.pipeline, states[0].arguments
        unpacked = pipe._unpack_latents(
            latents, given["height"], given["width"], pipe.vae_scale_factor
        )
        config = pipe.vae.config
        scaled = unpacked / config.scaling_factor + config.shift_factor
        picture: torch.Tensor = pipe.vae.decode(scaled, return_dict=False)[0]
        return picture
