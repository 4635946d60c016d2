"""What the token runtime needs of a model. `CausalLM` is it for plain causal language models; a
family with media, embeddings as input or payloads for later stages brings its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from omnistage.ar.cache_spec import LayerSpec
from omnistage.ar.prompt import MediaItem, PreparedPrompt
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniTokenSamplingParams

if TYPE_CHECKING:
    import torch

    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.runtime import LoadReporter


@dataclass(slots=True, kw_only=True, eq=False)
class RunningSequence:
    """One running sequence, as the executor and the model see it.

    `row` is its place in per-sequence device state (0 … max_num_seqs - 1) as long as it runs.
    `token_ids` are the prompt's and every token that has reached the host. `position_delta` is
    added to a decode step's index to get its position (M-RoPE). `media` are the encoders' results
    by item index. `own` is the model's, for as long as the sequence lives (also over a preemption).
    `seed` is the scheduler's (`SequenceStart.seed`).
    """

    prompt: PreparedPrompt
    params: OmniTokenSamplingParams
    row: int
    token_ids: list[int]
    position_delta: int = 0
    media: dict[int, Any] = field(default_factory=dict)
    input_complete: bool = True
    own: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Positions `start` … `start + count - 1` of one sequence, at packed places `first` …"""

    sequence: RunningSequence
    start: int
    count: int
    first: int


@dataclass(slots=True, kw_only=True)
class ModelBatch:
    """The tokens of one step, packed: T in all, sequences one after another without padding.

    The first `num_decodes` are one decode step each, of the sequences in `rows`; the rest are
    `chunks`. token_ids (T,) and positions (position_rows, T) are int64. In a captured graph there
    are no chunks, and rows may be padded: `rows` of padding name the spare row `max_num_seqs`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    num_decodes: int
    rows: torch.Tensor
    chunks: tuple[Chunk, ...] = ()


@dataclass(slots=True, kw_only=True)
class ModelOutput:
    """hidden (T, hidden_size) goes to `logits`. `states` by name, (T, …): kept beside keys and
    values for every position, so that a prompt's are there when its prefix came from the cache."""

    hidden: torch.Tensor
    states: dict[str, torch.Tensor] = field(default_factory=dict)


class TokenModel(Protocol):
    """A model loaded. Every method runs in the executing thread unless it says otherwise.

    `layers` has one entry per attention layer in order of `layer_idx`; `states` maps the names of
    `ModelOutput.states` to (shape of one token's, dtype). `position_rows` is 1, or 3 with M-RoPE.
    """

    module: torch.nn.Module
    layers: tuple[LayerSpec, ...]
    states: dict[str, tuple[tuple[int, ...], torch.dtype]]
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    position_rows: int
    tokenizer: Any
    """A `transformers` tokenizer, None for a model without text."""

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        """Chat template, tokenizer and processor; may run in another thread: touches no device and
        no state of the model. Raises `InvalidRequestError` for what the user got wrong."""

    def encode(self, items: Sequence[MediaItem]) -> list[Any]:
        """The encoders' results, one an item, kept by the runtime under the item's digest."""

    def begin(self, sequence: RunningSequence) -> None:
        """A sequence gets its row: make its device state. Called again after a preemption."""

    def append(self, sequence: RunningSequence, data: StageData) -> None:
        """Streamed input for a running sequence, once in its life: `begin` after a preemption does
        not bring it again."""

    def finish_input(self, sequence: RunningSequence) -> None:
        """No more input will come: called once, after `begin` and the last `append` and before the
        first step whose row says so."""

    def chunk_positions(self, sequence: RunningSequence, start: int, count: int) -> torch.Tensor:
        """(position_rows, count) int64 on the host."""

    def embed(self, batch: ModelBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """(T, hidden_size) embeddings and further arguments for `forward`. Without chunks it must
        be capturable: no host synchronisation, shapes from the batch's shapes only."""

    def forward(
        self, embeds: torch.Tensor, batch: ModelBatch, arguments: dict[str, Any]
    ) -> ModelOutput:
        """The decoder layers and the last norm. Attention goes through the runtime's interface."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(R, hidden_size) → (R, vocab_size). What must never be sampled is -inf."""

    def sampled(self, rows: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """Rows (R,) sampled these tokens (R,) from these hidden states (R, hidden_size): keep what
        the next decode step needs. Capturable."""

    def step_payload(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What decode steps of `rows` made for later stages, each (len(rows), …). Capturable; the
        runtime copies it before the next step. Empty where tokens are all there is."""

    def prompt_payload(
        self, sequence: RunningSequence, states: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What later stages need of a prompt, from `states` of its positions (P, …) on the device.
        Called once, when the prompt is computed; the runtime copies it to the host behind the next
        step."""

    def release(self, sequence: RunningSequence) -> None:
        """The sequence's row is free again."""


class TokenModelFactory(Protocol):
    """What `options["token_model"]` names by import string: builds the model of a stage."""

    def __call__(self, stage: ResolvedStage, device: str, report: LoadReporter) -> TokenModel: ...
