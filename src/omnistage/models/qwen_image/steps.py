"""Qwen-Image by steps (diffusers' `QwenImagePipeline` and `QwenImageEditPipeline`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omnistage.diffusion.family import Condition, Row, StepFamily, StepRequestState, stack_rows

if TYPE_CHECKING:
    import torch


class QwenImageSteps(StepFamily):
    """Guidance by `true_cfg_scale` and a negative prompt, rescaled to the conditional norm."""

    accepted = frozenset({"true_cfg_scale", "guidance_scale"})

    def install(self) -> list[Callable[[], None]]:
        from omnistage.attention.joint import install_joint_attention

        return [install_joint_attention(self.module)]

    def check(self, state: StepRequestState) -> None:
        given = state.arguments
        default = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        given["height"] = given["height"] or default
        given["width"] = given["width"] or default
        self._check_inputs(given)

    def _check_inputs(self, given: dict[str, Any]) -> None:
        self.pipeline.check_inputs(
            given["prompt"],
            given["height"],
            given["width"],
            negative_prompt=given["negative_prompt"],
            max_sequence_length=given["max_sequence_length"],
        )
        if self.pipeline.transformer.config.guidance_embeds and given["guidance_scale"] is None:
            raise ValueError("guidance_scale is required for guidance-distilled model.")

    def conditions(self, state: StepRequestState) -> list[dict[str, Any]]:
        given = state.arguments
        texts = [given["prompt"]]
        if given["true_cfg_scale"] > 1 and given["negative_prompt"] is not None:
            texts.append(given["negative_prompt"])
        return [{"text": text, "length": given["max_sequence_length"]} for text in texts]

    def encode(self, prompts: Sequence[dict[str, Any]]) -> list[Condition]:
        longest = max(one["length"] for one in prompts)
        embeds, mask = self.pipeline.encode_prompt(
            [one["text"] for one in prompts], max_sequence_length=longest
        )
        lengths = [embeds.shape[1]] * len(prompts) if mask is None else mask.sum(1).tolist()
        valid = [min(length, one["length"]) for length, one in zip(lengths, prompts, strict=True)]
        return [{"embeds": embeds[i : i + 1, :n]} for i, n in enumerate(valid)]

    def prepare(self, state: StepRequestState) -> None:
        pipe, given = self.pipeline, state.arguments
        embeds = state.branches[0]["embeds"]
        state.latents = pipe.prepare_latents(
            given["num_images_per_prompt"],
            pipe.transformer.config.in_channels // 4,
            given["height"],
            given["width"],
            embeds.dtype,
            embeds.device,
            state.generator,
            given["latents"],
        )
        state.extra["sizes"] = [self._grid(given["height"], given["width"])]
        self._schedule(state)

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        scale = self.pipeline.vae_scale_factor * 2
        return (1, height // scale, width // scale)

    def _schedule(self, state: StepRequestState) -> None:
        import numpy as np
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import (
            calculate_shift,
            retrieve_timesteps,
        )

        given, count = state.arguments, state.arguments["num_inference_steps"]
        sigmas = given["sigmas"]
        state.scheduler = self.own_scheduler(state)
        config = state.scheduler.config
        mu = calculate_shift(
            state.latents.shape[1],
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        state.timesteps, _ = retrieve_timesteps(
            state.scheduler,
            count,
            state.latents.device,
            sigmas=np.linspace(1.0, 1 / count, count) if sigmas is None else sigmas,
            mu=mu,
        )
        state.scheduler.set_begin_index(0)
        state.forward_key = (tuple(state.extra["sizes"]), state.latents.dtype)

    def static_inputs(self, rows: Sequence[Row]) -> dict[str, Any]:
        import torch

        lengths = torch.tensor([row.condition["embeds"].shape[1] for row in rows])
        embeds = stack_rows(rows, "embeds")
        guidance = None
        if self.pipeline.transformer.config.guidance_embeds:
            scales = [row.state.arguments["guidance_scale"] for row in rows]
            guidance = torch.tensor(scales, device=embeds.device, dtype=torch.float32)
        return {
            "encoder_hidden_states": embeds,
            "guidance": guidance,
            "img_shapes": [rows[0].state.extra["sizes"]] * len(rows),
            "attention_kwargs": {"text_lengths": lengths},
        }

    def moving_inputs(self, latents: torch.Tensor, timesteps: torch.Tensor) -> dict[str, Any]:
        return {"hidden_states": latents, "timestep": timesteps.to(latents.dtype) / 1000}

    def guide(self, state: StepRequestState, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        length = state.latents.shape[1]
        positive, *negative = [one[:, :length] for one in predictions]
        if not negative:
            return positive
        scale = state.arguments["true_cfg_scale"]
        combined = negative[0] + scale * (positive - negative[0])
        norm = torch.norm(positive, dim=-1, keepdim=True)
        return combined * (norm / torch.norm(combined, dim=-1, keepdim=True))

    def decode(self, latents: torch.Tensor, states: Sequence[StepRequestState]) -> torch.Tensor:
        import torch

        pipe, given = self.pipeline, states[0].arguments
        vae, shape = pipe.vae, (1, -1, 1, 1, 1)
        unpacked = pipe._unpack_latents(
            latents, given["height"], given["width"], pipe.vae_scale_factor
        ).to(vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(unpacked)
        inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(unpacked)
        picture: torch.Tensor = vae.decode(unpacked / inverse_std + mean, return_dict=False)[0]
        return picture[:, :, 0]
