"""The thinker as a token model: text, pictures, sound and video in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnistage.ar.gate import observe_layers
from omnistage.models.qwen3_omni import media_features
from omnistage.models.qwen3_omni.rope import RopeRows

if TYPE_CHECKING:
    import torch

    from omnistage.ar.cache_spec import LayerSpec
    from omnistage.ar.model import ModelBatch, ModelOutput, RunningSequence
    from omnistage.ar.prompt import MediaItem, PreparedPrompt
    from omnistage.contracts.payloads import StageData
    from omnistage.contracts.sampling import OmniTokenSamplingParams
    from omnistage.models.qwen3_omni.thinker_inputs import ThinkerInputs

TALKER_STATE = "talker_hidden"
"""Name of the hidden state that the talker takes for positions of media, here and in payloads."""

PAYLOAD_MEDIA = (
    "image_grid_thw",
    "video_grid_thw",
    "video_second_per_grid",
    "audio_feature_lengths",
)
"""What else of media the talker's positions follow from."""


class ThinkerModel:
    """`module` is a `Qwen3OmniMoeThinkerForConditionalGeneration` built for paged attention.

    `accept_layer` is the talker's `accept_hidden_layer`; None where nothing feeds a talker.
    """

    def __init__(
        self,
        module: Any,
        inputs: ThinkerInputs,
        *,
        rows: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        accept_layer: int | None = None,
    ) -> None:
        config = module.config.text_config
        self.module = module
        self.inputs = inputs
        self.decoder = getattr(module.model, "language_model", module.model)
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.position_rows = 3
        self.tokenizer = inputs.tokenizer
        self.states: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._rope = RopeRows(rows + 1, module.device)
        self._accept_layer = accept_layer
        self._accepted: torch.Tensor | None = None
        if accept_layer is not None:
            self.states[TALKER_STATE] = ((config.hidden_size,), module.dtype)
            self._watch(accept_layer)
        self.layers: tuple[LayerSpec, ...] = observe_layers(self)

    def probe_prompts(self, lengths: Sequence[int]) -> list[PreparedPrompt]:
        """For the gate at load."""
        return [self.inputs.probe(length) for length in lengths]

    def _watch(self, accept_layer: int) -> None:
        """`transformers` counts the embeddings as hidden state 0 and the last norm's output as the
        last; those between are layers' outputs before deepstack features are added."""
        layers = len(self.decoder.layers)
        if not 0 <= accept_layer <= layers:
            raise ValueError(f"accept_hidden_layer is {accept_layer}; there are {layers} layers")
        if 0 < accept_layer < layers:
            self.decoder.layers[accept_layer - 1].register_forward_hook(self._keep)

    def _keep(self, _layer: Any, _arguments: Any, output: Any) -> None:
        self._accepted = output[0] if isinstance(output, tuple) else output

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        return self.inputs.prepare(data, params)

    def encode(self, items: Sequence[MediaItem]) -> list[Any]:
        return [media_features.encode(self.module, item) for item in items]

    def begin(self, sequence: RunningSequence) -> None:
        self._rope.begin(sequence)

    def append(self, sequence: RunningSequence, data: StageData) -> None:
        raise NotImplementedError("a thinker's prompt comes in one piece")

    def finish_input(self, sequence: RunningSequence) -> None:
        return None

    def chunk_positions(self, sequence: RunningSequence, start: int, count: int) -> torch.Tensor:
        return self._rope.chunk(sequence, start, count)

    def embed(self, batch: ModelBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        embeds = self.decoder.embed_tokens(batch.token_ids)
        deepstack = media_features.scatter(batch.chunks, embeds) if batch.chunks else {}
        return embeds, {"position_ids": self._rope.of_batch(batch), **deepstack}

    def forward(
        self, embeds: torch.Tensor, batch: ModelBatch, arguments: dict[str, Any]
    ) -> ModelOutput:
        from omnistage.ar.model import ModelOutput

        output = self.decoder(inputs_embeds=embeds.unsqueeze(0), use_cache=False, **arguments)
        hidden = output.last_hidden_state[0]
        if self._accept_layer is None:
            return ModelOutput(hidden=hidden)
        return ModelOutput(hidden=hidden, states={TALKER_STATE: self._take_state(embeds, hidden)})

    def _take_state(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self._accept_layer == 0:
            return embeds
        kept, self._accepted = self._accepted, None
        return hidden if kept is None else kept[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module.lm_head(hidden)
        return logits

    def sampled(self, rows: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        return None

    def step_payload(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

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

    def release(self, sequence: RunningSequence) -> None:
        return None
