"""Any `AutoModelForCausalLM` as the token runtime's model: its own module, called in parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from omnistage.ar.cache_spec import LayerSpec
from omnistage.ar.gate import observe_layers
from omnistage.ar.model import ModelBatch, ModelOutput, RunningSequence
from omnistage.ar.prompt import MediaItem, PreparedPrompt
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniTokenSamplingParams

LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
"""Their frequencies follow the longest position of a batch: beyond the original length, sequences
of one batch would change each other's."""
NO_POSITION_LIMIT = 1 << 20
"""Tokens, for a configuration that names no bound."""


class CausalLM:
    """See `TokenModel`. `module` is built with the runtime's attention implementation
    (`omnistage.attention.paged`) and in evaluation mode.

    Raises `UnsupportedCombinationError` for a module whose layers do not all attend through it.
    """

    position_rows = 1

    def __init__(self, module: nn.Module, *, tokenizer: Any) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.states: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._text_config = module.config.get_text_config(decoder=True)
        self._base = decoder_of(module)
        self._embeddings = module.get_input_embeddings()
        self._head: nn.Module | None = None
        self.vocab_size: int = self._text_config.vocab_size
        self.eos_token_ids = eos_token_ids(module)
        self.layers: tuple[LayerSpec, ...] = observe_layers(self)
        self.max_model_len = position_limit(self._text_config)

    @property
    def num_layers(self) -> int:
        return int(self._text_config.num_hidden_layers)

    @property
    def layer_types(self) -> Sequence[str] | None:
        """Of each layer, where the configuration says ("full_attention", "sliding_attention")."""
        types: Sequence[str] | None = getattr(self._text_config, "layer_types", None)
        return types

    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """(T, vocab_size) as the module itself gives them for one sequence. Its attention
        implementation must be one of the library's."""
        ids = torch.tensor([list(token_ids)], device=self._embeddings.weight.device)
        logits: torch.Tensor = self.module(input_ids=ids, use_cache=False).logits[0]
        return logits

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        """From "prompt_token_ids" or "prompt"."""
        ids = data.fields.get("prompt_token_ids")
        if ids is not None:
            return PreparedPrompt(token_ids=list(ids))
        text = data.fields.get("prompt")
        if not isinstance(text, str) or self.tokenizer is None:
            raise InvalidRequestError("give 'prompt' (a string) or 'prompt_token_ids'")
        return PreparedPrompt(token_ids=list(self.tokenizer(text).input_ids))

    def encode(self, items: Sequence[MediaItem]) -> list[Any]:
        raise InvalidRequestError(
            f"{type(self.module).__name__} takes text only, no {items[0].kind}"
        )

    def begin(self, sequence: RunningSequence) -> None:
        pass

    def append(self, sequence: RunningSequence, data: StageData) -> None:
        raise InvalidRequestError("a language model takes its whole prompt at once")

    def finish_input(self, sequence: RunningSequence) -> None:
        pass

    def chunk_positions(self, sequence: RunningSequence, start: int, count: int) -> torch.Tensor:
        return torch.arange(start, start + count).unsqueeze(0)

    def embed(self, batch: ModelBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        return self._embeddings(batch.token_ids), {}

    def forward(
        self, embeds: torch.Tensor, batch: ModelBatch, arguments: dict[str, Any]
    ) -> ModelOutput:
        output = self._base(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=batch.positions,
            use_cache=False,
            **arguments,
        )
        return ModelOutput(hidden=output.last_hidden_state[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the module's own `forward` makes of its decoder's result: head, scale, softcap."""
        if self._head is None:
            self._head = head_of(self.module, self._base)
        logits: torch.Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0]

    def sampled(self, rows: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        pass

    def step_payload(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def prompt_payload(
        self, sequence: RunningSequence, states: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {}

    def release(self, sequence: RunningSequence) -> None:
        pass


@dataclass
class DecoderOutput(MoeModelOutputWithPast):
    """With every field that a class may hand on from its decoder's output."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


class GivenHidden(nn.Module):
    """Stands where a causal model has its decoder: returns the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> DecoderOutput:
        return DecoderOutput(last_hidden_state=inputs_embeds)


def decoder_of(module: nn.Module) -> nn.Module:
    """The child of a causal model that holds everything but its head.

    Raises `UnsupportedCombinationError` where there is none.
    """
    base: nn.Module = module.base_model
    if all(child is not base for child in module.children()):
        raise UnsupportedCombinationError(
            f"{type(module).__name__} does not hold its decoder as {module.base_model_prefix!r}, "
            "so its logits cannot be computed apart from it"
        )
    return base


def head_of(module: nn.Module, decoder: nn.Module) -> nn.Module:
    """A module of the same class that shares everything with `module` but its decoder, so that
    calling it with hidden states as `inputs_embeds` does what the class does behind its decoder."""
    head = copy.copy(module)
    head.__dict__["_modules"] = {
        name: GivenHidden() if child is decoder else child
        for name, child in module.named_children()
    }
    return head


def eos_token_ids(module: nn.Module) -> frozenset[int]:
    """As `generate` takes them: from the generation config, else from the model's."""
    generation = getattr(module, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = module.config.get_text_config(decoder=True).eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def position_limit(config: Any) -> int:
    """Tokens of the longest sequence that the model's positions are meant for."""
    limit = getattr(config, "max_position_embeddings", None) or NO_POSITION_LIMIT
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPES:
        original = rope.get("original_max_position_embeddings") or limit
        return min(limit, int(original))
    return int(limit)
