"""Flux.1 by steps (diffusers' `FluxPipeline`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnistage.diffusion.family import Condition, Row, StepRequestState
from omnistage.diffusion.flow_family import FlowFamily, encode_by, shift_of

if TYPE_CHECKING:
    import torch


class FluxSteps(FlowFamily):
    """Guidance by an input of the model where it is distilled, and by `true_cfg_scale` with a
    negative prompt. Texts are padded to `max_sequence_length`, nothing is masked."""

    accepted = frozenset({"prompt_2", "negative_prompt_2", "true_cfg_scale", "guidance_scale"})
    texts = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")

    def conditions(self, state: StepRequestState) -> list[dict[str, Any]]:
        given = state.arguments
        return [
            {
                "prompt": given[f"{kind}prompt"],
                "prompt_2": given[f"{kind}prompt_2"] or given[f"{kind}prompt"],
                "max_sequence_length": given["max_sequence_length"],
            }
            for kind in self.true_texts(given)
        ]

    def encode(self, prompts: Sequence[dict[str, Any]]) -> list[Condition]:
        return encode_by(prompts, ("prompt", "prompt_2"), self._encode)

    def _encode(self, **arguments: Any) -> dict[str, torch.Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(**arguments)
        return {"embeds": embeds, "pooled": pooled}

    def prepare(self, state: StepRequestState) -> None:
        given, embeds = state.arguments, state.branches[0]["embeds"]
        (state.extra["img_ids"],) = self.start(state, self.module.config.in_channels // 4)
        state.scheduler = self.own_scheduler(state)
        if state.scheduler.config.get("use_flow_sigmas"):
            mu = shift_of(state.scheduler, state.latents.shape[1])
            self.schedule(state, None, mu=mu)
            state.scheduler.set_begin_index(0)
        else:
            self.schedule_evenly(state)
        state.forward_key = (given["height"], given["width"], embeds.shape[1], embeds.dtype)

    def static_inputs(self, rows: Sequence[Row]) -> dict[str, Any]:
        import torch

        embeds = torch.cat([row.condition["embeds"] for row in rows])
        return {
            "encoder_hidden_states": embeds,
            "pooled_projections": torch.cat([row.condition["pooled"] for row in rows]),
            "guidance": self.embedded_guidance(rows),
            "txt_ids": embeds.new_zeros(embeds.shape[1], 3),
            "img_ids": rows[0].state.extra["img_ids"],
        }

    def guide(self, state: StepRequestState, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.combine(predictions, state.arguments["true_cfg_scale"])

    def decode(self, latents: torch.Tensor, states: Sequence[StepRequestState]) -> torch.Tensor:
        return self.decode_scaled(self.unpacked(latents, states[0]))
