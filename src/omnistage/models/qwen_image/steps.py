"""Qwen-Image by steps (diffusers' `QwenImagePipeline` and its Edit and EditPlus)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omnistage.diffusion.family import Condition, Row, StepRequestState, stack_rows
from omnistage.diffusion.flow_family import FlowFamily, unpadded
from omnistage.diffusion.joined_pictures import MEGAPIXEL, pixels_of, size_of_area

if TYPE_CHECKING:
    import torch


class QwenImageSteps(FlowFamily):
    """Guidance by `true_cfg_scale` and a negative prompt, rescaled to the conditional norm."""

    accepted = frozenset({"true_cfg_scale", "guidance_scale"})

    def install(self, *, fuse: bool) -> list[Callable[[], None]]:
        from omnistage.attention.joint import install_joint_attention

        self.joins_lengths = getattr(self.module, "_parallel_config", None) is None
        return [install_joint_attention(self.module, fuse=fuse)] if self.joins_lengths else []

    def check_call(self, given: Mapping[str, Any]) -> None:
        super().check_call(given)
        if self.module.config.guidance_embeds and given["guidance_scale"] is None:
            raise ValueError("guidance_scale is required for guidance-distilled model.")

    def conditions(self, state: StepRequestState) -> list[dict[str, Any]]:
        given = state.arguments
        length = given["max_sequence_length"]
        return [
            {"text": given[f"{kind}prompt"], "length": length} for kind in self.true_texts(given)
        ]

    def encode(self, prompts: Sequence[dict[str, Any]]) -> list[Condition]:
        longest = max(one["length"] for one in prompts)
        embeds, mask = self.pipeline.encode_prompt(
            [one["text"] for one in prompts], max_sequence_length=longest
        )
        return [
            {"embeds": one["embeds"][:, : wanted["length"]]}
            for one, wanted in zip(unpadded(embeds, mask), prompts, strict=True)
        ]

    def prepare(self, state: StepRequestState) -> None:
        given = state.arguments
        self.start(state, self.module.config.in_channels // 4)
        self.finish(state, [(given["height"], given["width"])])

    def finish(self, state: StepRequestState, sizes: Sequence[tuple[int, int]]) -> None:
        """`sizes`: (height, width) in pixels of all pictures in the sequence, the result first."""
        scale = self.pipeline.vae_scale_factor * 2
        grids = [(1, height // scale, width // scale) for height, width in sizes]
        state.extra["grids"] = grids
        state.scheduler = self.own_scheduler(state)
        self.schedule_evenly(state)
        state.forward_key = (tuple(grids), state.latents.dtype)

    def static_inputs(self, rows: Sequence[Row]) -> dict[str, Any]:
        import torch

        lengths = torch.tensor([row.condition["embeds"].shape[1] for row in rows])
        return {
            "encoder_hidden_states": stack_rows(rows, "embeds"),
            "guidance": self.embedded_guidance(rows),
            "img_shapes": [rows[0].state.extra["grids"]] * len(rows),
            "attention_kwargs": {"text_lengths": lengths} if self.joins_lengths else None,
        }

    def guide(self, state: StepRequestState, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        of_result = [one[:, : state.latents.shape[1]] for one in predictions]
        combined = self.combine(of_result, state.arguments["true_cfg_scale"])
        if len(of_result) == 1:
            return combined
        norm = torch.norm(of_result[0], dim=-1, keepdim=True)
        return combined * (norm / torch.norm(combined, dim=-1, keepdim=True))

    def decode(self, latents: torch.Tensor, states: Sequence[StepRequestState]) -> torch.Tensor:
        return self.decode_normalized(self.unpacked(latents, states[0]))


class QwenImageEditSteps(QwenImageSteps):
    """Prompts are encoded with the pictures, whose latents follow the result's."""

    prompt_area = MEGAPIXEL

    def check(self, state: StepRequestState) -> None:
        given, multiple = state.arguments, self.pipeline.vae_scale_factor * 2
        suited = size_of_area(state.pictures[-1], MEGAPIXEL)
        for name, size in zip(("height", "width"), suited, strict=True):
            given[name] = (given[name] or size) // multiple * multiple
        self.check_call(given)

    def seen(self, state: StepRequestState) -> Sequence[Any]:
        """The pictures as the text encoder gets them."""
        resize, area = self.pipeline.image_processor.resize, self.prompt_area
        return [resize(one, *size_of_area(one, area)) for one in state.pictures]

    joined = seen

    def conditions(self, state: StepRequestState) -> list[dict[str, Any]]:
        pictures = self.seen(state)
        return [{**one, "pictures": pictures} for one in super().conditions(state)]

    def encode(self, prompts: Sequence[dict[str, Any]]) -> list[Condition]:
        pictures = [picture for one in prompts for picture in one["pictures"]]
        return unpadded(*self.pipeline.encode_prompt([one["text"] for one in prompts], pictures))

    def prepare(self, state: StepRequestState) -> None:
        given = state.arguments
        sizes = [size_of_area(one, MEGAPIXEL) for one in state.pictures]
        pixels = pixels_of(self.pipeline, self.joined(state), sizes)
        (state.extra["pictures"],) = self.start(state, self.module.config.in_channels // 4, pixels)
        self.finish(state, [(given["height"], given["width"]), *sizes])


class QwenImageEditPlusSteps(QwenImageEditSteps):
    """Several pictures, which the text encoder sees smaller and with one prompt at a time."""

    prompt_area = 384 * 384

    def encode(self, prompts: Sequence[dict[str, Any]]) -> list[Condition]:
        return [QwenImageEditSteps.encode(self, [one])[0] for one in prompts]

    def joined(self, state: StepRequestState) -> Sequence[Any]:
        return state.pictures
