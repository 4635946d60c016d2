"""The thinker as a token model, and what it hands to the talker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omnistage.ar.media_lm import MediaLM

if TYPE_CHECKING:
    import torch

    from omnistage.ar.media_prompts import MediaPrompts
    from omnistage.ar.model import ModelBatch, RunningSequence

TALKER_STATE = "talker_hidden"
"""Name of the hidden state that the talker takes for positions of media, here and in payloads."""

PAYLOAD_MEDIA = (
    "image_grid_thw",
    "video_grid_thw",
    "video_second_per_grid",
    "audio_feature_lengths",
)
"""What else of media the talker's positions follow from."""


class ThinkerModel(MediaLM):
    """`module` is a `Qwen3OmniMoeThinkerForConditionalGeneration` built for paged attention.

    `accept_layer` is the talker's `accept_hidden_layer`; None where nothing feeds a talker.
    """

    def __init__(
        self,
        module: Any,
        inputs: MediaPrompts,
        *,
        rows: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        accept_layer: int | None = None,
    ) -> None:
        self._accept_layer = accept_layer
        self._accepted: torch.Tensor | None = None
        self.states = {}
        if accept_layer is not None:
            size = module.config.text_config.hidden_size
            self.states[TALKER_STATE] = ((size,), module.dtype)
            self._watch(getattr(module.model, "language_model", module.model), accept_layer)
        super().__init__(
            module, inputs, rows=rows, eos_token_ids=eos_token_ids, max_model_len=max_model_len
        )

    def _watch(self, decoder: Any, accept_layer: int) -> None:
        """`transformers` counts the embeddings as hidden state 0 and the last norm's output as the
        last; those between are layers' outputs before deepstack features are added."""
        layers = len(decoder.layers)
        if not 0 <= accept_layer <= layers:
            raise ValueError(f"accept_hidden_layer is {accept_layer}; there are {layers} layers")
        if 0 < accept_layer < layers:
            decoder.layers[accept_layer - 1].register_forward_hook(self._keep)

    def _keep(self, _layer: Any, _arguments: Any, output: Any) -> None:
        self._accepted = output[0] if isinstance(output, tuple) else output

    def states_of(
        self, embeds: torch.Tensor, hidden: torch.Tensor, batch: ModelBatch
    ) -> dict[str, torch.Tensor]:
        if self._accept_layer is None:
            return {}
        if self._accept_layer == 0:
            return {TALKER_STATE: embeds}
        kept, self._accepted = self._accepted, None
        return {TALKER_STATE: hidden if kept is None else kept[0]}

    def prompt_payload(
        self, sequence: RunningSequence, states: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The talker's hidden states (n, hidden_size) at the n positions of media, in order, and
        `PAYLOAD_MEDIA`. Text needs no state: its ids say it all."""
        import torch

        where = sequence.prompt.own["media_places"]
        if not len(where):
            return {}
        state = states[TALKER_STATE]
        media = sequence.prompt.own["media"]
        payload = {name: media[name] for name in PAYLOAD_MEDIA if name in media}
        payload[TALKER_STATE] = state[torch.from_numpy(where).to(state.device)]
        return payload
