"""What the families of flow matching have in common: checks, first latents, schedule, guidance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from omnistage.contracts.errors import InvalidRequestError
from omnistage.diffusion.family import Condition, Row, StepFamily, StepRequestState

if TYPE_CHECKING:
    import torch


class FlowFamily(StepFamily):
    """`texts` are the call's arguments that hold a text, as `check_inputs` takes them."""

    texts: ClassVar[tuple[str, ...]] = ("prompt", "negative_prompt")
    _moments: tuple[torch.Tensor, torch.Tensor] | None = None

    def check(self, state: StepRequestState) -> None:
        given = state.arguments
        default = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        given["height"] = given["height"] or default
        given["width"] = given["width"] or default
        self.check_call(given)

    def check_call(self, given: Mapping[str, Any]) -> None:
        """The pipeline's own checks, and that texts are single ones."""
        for name in self.texts:
            if given[name] is not None and not isinstance(given[name], str):
                raise InvalidRequestError(
                    f"{name} must be a text, got {type(given[name]).__name__}", param=name
                )
        names = (*self.texts, "height", "width", "max_sequence_length")
        self.pipeline.check_inputs(**{name: given[name] for name in names})

    def start(self, state: StepRequestState, channels: int, *pictures: Any) -> list[Any]:
        """Set the first latents: the caller's, or drawn as the pipeline draws them. Returns what
        else its `prepare_latents` makes. Raises `InvalidRequestError` for latents that do not fit.
        """
        given, embeds = state.arguments, state.branches[0]["embeds"]
        count, size = given["num_images_per_prompt"], (given["height"], given["width"])
        made = self.pipeline.prepare_latents(
            *pictures, count, channels, *size, embeds.dtype, embeds.device, state.generator
        )
        state.latents, *others = made if isinstance(made, tuple) else (made,)
        if given["latents"] is not None:
            if given["latents"].shape != state.latents.shape:
                raise InvalidRequestError(
                    f"latents must be of shape {tuple(state.latents.shape)} for this request, "
                    f"got {tuple(given['latents'].shape)}",
                    param="latents",
                )
            state.latents = given["latents"].to(state.latents)
        return others

    def schedule(self, state: StepRequestState, sigmas: Any, **shift: float) -> None:
        """Timesteps for `num_inference_steps` or `sigmas`, shifted by "mu" where it is given.

        Raises `ValueError` for sigmas that the scheduler does not take.
        """
        from diffusers.pipelines.flux.pipeline_flux import retrieve_timesteps

        count = state.arguments["num_inference_steps"]
        state.timesteps, _ = retrieve_timesteps(
            state.scheduler, count, state.latents.device, sigmas=sigmas, **shift
        )
        # Known from the start: looking it up by the timestep would wait for the device.
        state.scheduler.set_begin_index(0)

    def schedule_evenly(self, state: StepRequestState) -> None:
        """For packed latents (outputs, tokens, …): evenly from 1 to 1 / steps unless the request
        has sigmas of its own, shifted by the number of tokens."""
        import numpy as np

        sigmas, count = state.arguments["sigmas"], state.arguments["num_inference_steps"]
        if sigmas is None:
            sigmas = np.linspace(1.0, 1 / count, count)
        self.schedule(state, sigmas, mu=shift_of(state.scheduler, state.latents.shape[1]))

    def true_texts(self, given: Mapping[str, Any]) -> list[str]:
        """Prefixes of the guidance branches' texts where guidance needs a negative prompt."""
        guided = given["true_cfg_scale"] > 1 and given["negative_prompt"] is not None
        return ["", "negative_"] if guided else [""]

    def embedded_guidance(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """float32 (rows,) for models that take the scale as an input."""
        import torch

        if not self.module.config.guidance_embeds:
            return None
        scales = [row.state.arguments["guidance_scale"] for row in rows]
        device = rows[0].state.latents.device
        return torch.tensor(scales, device=device, dtype=torch.float32)

    def moving_inputs(self, latents: torch.Tensor, timesteps: torch.Tensor) -> dict[str, Any]:
        return {"hidden_states": latents, "timestep": timesteps.to(latents.dtype) / 1000}

    def combine(self, predictions: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """Away from the negative prediction, where there is one."""
        positive, *negative = predictions
        return negative[0] + scale * (positive - negative[0]) if negative else positive

    def model_latents(self, state: StepRequestState) -> torch.Tensor:
        """Latents of pictures that guide the result, `extra["pictures"]`, follow its own."""
        import torch

        pictures = state.extra.get("pictures")
        return state.latents if pictures is None else torch.cat([state.latents, pictures], dim=1)

    def unpacked(self, latents: torch.Tensor, state: StepRequestState) -> torch.Tensor:
        """Packed latents (rows, tokens, …) as the autoencoder takes them."""
        given, scale = state.arguments, self.pipeline.vae_scale_factor
        latents = self.pipeline._unpack_latents(latents, given["height"], given["width"], scale)
        return latents.to(self.pipeline.vae.dtype)

    def decode_scaled(self, latents: torch.Tensor) -> torch.Tensor:
        """By an autoencoder whose latents have one scale and one shift."""
        vae = self.pipeline.vae
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        pictures: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
        return pictures

    def decode_normalized(self, latents: torch.Tensor) -> torch.Tensor:
        """By an autoencoder of videos (rows, channels, frames, …) whose latents have a mean and a
        deviation for each channel: the first frames."""
        if self._moments is None:
            self._moments = self._latent_moments(latents)
        mean, inverse_std = self._moments
        scaled = latents / inverse_std + mean
        frames: torch.Tensor = self.pipeline.vae.decode(scaled, return_dict=False)[0]
        return frames[:, :, 0]

    def _latent_moments(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Made once: bringing them to the device waits for all that it has been given."""
        import torch

        config, shape = self.pipeline.vae.config, (1, -1, 1, 1, 1)
        mean = torch.tensor(config.latents_mean).view(shape).to(like)
        return mean, 1.0 / torch.tensor(config.latents_std).view(shape).to(like)


def shift_of(scheduler: Any, num_tokens: int, max_shift: float = 1.15) -> float:
    """The schedule's shift "mu" for pictures of `num_tokens`; `max_shift` where the scheduler's
    configuration has none."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = scheduler.config
    mu: float = calculate_shift(
        num_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )
    return mu


def encode_by(
    prompts: Sequence[dict[str, Any]],
    texts: Sequence[str],
    encode: Callable[..., Mapping[str, torch.Tensor]],
) -> list[Condition]:
    """Encode with as few calls as can be, for encoders that pad to a fixed length: those equal but
    for `texts` share a call, in which each of `texts` is a list."""
    encoded: list[Condition] = [{} for _ in prompts]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, one in enumerate(prompts):
        shared = tuple((name, value) for name, value in one.items() if name not in texts)
        groups.setdefault(shared, []).append(index)
    for shared, members in groups.items():
        lists = {name: [prompts[index][name] for index in members] for name in texts}
        tensors = encode(**lists, **dict(shared))
        for row, index in enumerate(members):
            encoded[index] = {name: value[row : row + 1] for name, value in tensors.items()}
    return encoded


def unpadded(embeds: torch.Tensor, mask: torch.Tensor | None) -> list[Condition]:
    """Of (n, tokens, width) each row's valid tokens, which come first, in memory of their own: a
    request must not keep what was encoded beside it."""
    count, longest = embeds.shape[:2]
    lengths = [longest] * count if mask is None else mask.sum(1).tolist()
    return [{"embeds": embeds[i : i + 1, :length].clone()} for i, length in enumerate(lengths)]
