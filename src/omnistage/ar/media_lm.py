"""A language model with encoders as a token model: text, pictures, sound and video in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnistage.ar import media_features
from omnistage.ar.gate import observe_layers
from omnistage.ar.mrope import RopeRows

if TYPE_CHECKING:
    import torch

    from omnistage.ar.cache_spec import LayerSpec
    from omnistage.ar.media_prompts import MediaPrompts
    from omnistage.ar.model import ModelBatch, ModelOutput, RunningSequence
    from omnistage.ar.prompt import MediaItem, PreparedPrompt
    from omnistage.contracts.payloads import StageData
    from omnistage.contracts.sampling import OmniTokenSamplingParams


class MediaLM:
    """`module` is a `…ThinkerForConditionalGeneration` of `transformers`, built for paged
    attention.

    What later stages need of it a subclass adds: `states` before this constructor, `states_of`, and
    the payloads.
    """

    position_rows = 3
    states: dict[str, tuple[tuple[int, ...], torch.dtype]]

    def __init__(
        self,
        module: Any,
        inputs: MediaPrompts,
        *,
        rows: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        config = module.config.text_config
        self.module = module
        self.inputs = inputs
        self.decoder = getattr(module.model, "language_model", module.model)
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.tokenizer = inputs.tokenizer
        self._rope = RopeRows(rows + 1, module.device)
        self.layers: tuple[LayerSpec, ...] = observe_layers(self)

    def probe_prompts(self, lengths: Sequence[int]) -> list[PreparedPrompt]:
        """For the gate at load."""
        return [self.inputs.probe(length) for length in lengths]

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
        return ModelOutput(hidden=hidden, states=self.states_of(embeds, hidden, batch))

    def states_of(
        self, embeds: torch.Tensor, hidden: torch.Tensor, batch: ModelBatch
    ) -> dict[str, torch.Tensor]:
        """What is kept of every position for `prompt_payload`: `ModelOutput.states`."""
        return {}

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
        return {}

    def release(self, sequence: RunningSequence) -> None:
        return None
