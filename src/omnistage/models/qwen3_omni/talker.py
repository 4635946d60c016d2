"""The talker as a token model: one codec frame a step, conditioned on the thinker's text as it
streams in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnistage.ar.gate import observe_layers
from omnistage.ar.host_tensors import to_device
from omnistage.ar.mrope import RopeRows
from omnistage.models.qwen3_omni.code_predictor import FramePredictor
from omnistage.models.qwen3_omni.code_sampling import CodeSampling
from omnistage.models.qwen3_omni.talker_rows import TalkerRows

if TYPE_CHECKING:
    import torch

    from omnistage.ar.cache_spec import LayerSpec
    from omnistage.ar.model import Chunk, ModelBatch, ModelOutput, RunningSequence
    from omnistage.ar.prompt import MediaItem, PreparedPrompt
    from omnistage.contracts.payloads import StageData
    from omnistage.contracts.sampling import OmniTokenSamplingParams
    from omnistage.models.qwen3_omni.talker_prompt import AnswerText, TalkerPrompts

UNSPOKEN_IDS = 1024
"""The last ids of the vocabulary are the codec's control tokens: only its end may be sampled."""

PROJECTED_AT_ONCE = 8192
"""Rows of the text table that are projected in one go while loading."""


class TalkerModel:
    """`module` is a `Qwen3OmniMoeTalkerForConditionalGeneration` built for paged attention.

    `text_table` (thinker vocabulary, hidden_size) is `project_text` of the thinker's embeddings: a
    text id's place in the talker's input is a lookup.
    """

    tokenizer = None
    position_rows = 3

    def __init__(
        self,
        module: Any,
        text_table: torch.Tensor,
        prompts: TalkerPrompts,
        *,
        rows: int,
        max_model_len: int,
    ) -> None:
        import torch

        text, talker = module.config.text_config, module.config
        self.module = module
        self.num_layers: int = text.num_hidden_layers
        self.states: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.vocab_size: int = text.vocab_size
        self.eos_token_ids = frozenset((int(talker.codec_eos_token_id),))
        self.max_model_len = max_model_len
        self._prompts = prompts
        self._text_table = text_table
        self._predictor = FramePredictor(module.code_predictor, rows + 1)
        self._rope = RopeRows(rows + 1, text_table.device)
        self._rows = TalkerRows(
            rows=rows + 1,
            capacity=max_model_len + 1,
            groups=self._predictor.groups,
            hidden_like=text_table,
            pad_id=prompts.config.tts_pad_token_id,
        )
        codes = module.code_predictor.config.vocab_size
        self._sampling = CodeSampling(rows + 1, codes, self._predictor.groups, text_table.device)
        unspoken = torch.arange(text.vocab_size) >= text.vocab_size - UNSPOKEN_IDS
        unspoken[list(self.eos_token_ids)] = False
        self._unspoken = unspoken.to(text_table.device)
        self.layers: tuple[LayerSpec, ...] = observe_layers(self)

    def fuse_for_gpu(self) -> dict[str, Any]:
        """The code predictor runs fifteen times a step: what is done to layers is done to its."""
        import torch

        self._predictor.fuse(torch.ops.omnistage.linear)
        self._sampling.fuse()
        return {"fused_code_predictor": True}

    def probe_prompts(self, lengths: Sequence[int]) -> list[PreparedPrompt]:
        """For the gate at load."""
        return [self._prompts.probe(length, len(self._text_table)) for length in lengths]

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        return self._prompts.prepare(data, params)

    def encode(self, items: Sequence[MediaItem]) -> list[Any]:
        raise NotImplementedError("a talker has no encoders")

    def begin(self, sequence: RunningSequence) -> None:
        self._rope.begin(sequence)
        self._rows.begin(sequence)
        self._sampling.begin(sequence)
        self._write_text(sequence, 0)
        sequence.own["prompt_embeds"] = self._prompt_embeds(sequence.prompt.own)

    def append(self, sequence: RunningSequence, data: StageData) -> None:
        text: AnswerText = sequence.prompt.own["text"]
        first = max(0, len(text.tail) + len(text.generated) - 1)
        text.generated.extend(data.fields["token_ids"])
        self._write_text(sequence, first)

    def finish_input(self, sequence: RunningSequence) -> None:
        text: AnswerText = sequence.prompt.own["text"]
        text.complete = True
        self._write_text(sequence, max(0, len(text.tail) + len(text.generated) - 2))

    def _write_text(self, sequence: RunningSequence, first: int) -> None:
        text: AnswerText = sequence.prompt.own["text"]
        end_id = self._prompts.config.tts_eos_token_id
        self._rows.write_text(sequence.row, first, text.trailing(first, end_id))

    def _prompt_embeds(self, own: dict[str, Any]) -> torch.Tensor:
        """(P, hidden_size): text by table, media from the thinker's states, codec tokens added to
        the last positions."""
        import torch

        device = self._text_table.device
        embeds = self._text_table[to_device(own["text_ids"], torch.int64, device)]
        if "media_states" in own:
            states = own["media_states"].to(device, self._text_table.dtype)
            embeds[own["media_places"].to(device)] = self.module.hidden_projection(states)
        codec_ids = to_device(own["codec_ids"], torch.int64, device)
        embeds[-len(codec_ids) :] += self.module.model.codec_embedding(codec_ids)
        return embeds

    def chunk_positions(self, sequence: RunningSequence, start: int, count: int) -> torch.Tensor:
        return self._rope.chunk(sequence, start, count)

    def embed(self, batch: ModelBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        import torch

        parts = [self._chunk_embeds(chunk) for chunk in batch.chunks]
        if batch.num_decodes:
            tokens = batch.token_ids[: batch.num_decodes]
            parts.insert(0, self._decode_embeds(batch.rows, tokens))
        return torch.cat(parts), {"position_ids": self._rope.of_batch(batch)}

    def _decode_embeds(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Finish the frames of `tokens` (S,), and make the inputs (S, hidden_size) that follow from
        them: all codes' embeddings, and the next of the text."""
        embeds = self.module.model.codec_embedding(tokens)
        choose = self._sampling.of_rows(rows, self._rows.steps[rows])
        codes, summed = self._predictor.predict(self._rows.hidden[rows], tokens, embeds, choose)
        return summed + self._text_table[self._rows.next_frame(rows, codes)]

    def _chunk_embeds(self, chunk: Chunk) -> torch.Tensor:
        """A prompt's part, and, after a preemption, what was generated before it."""
        import torch

        sequence = chunk.sequence
        prompt: torch.Tensor = sequence.own["prompt_embeds"]
        parts = [prompt[chunk.start : chunk.start + chunk.count]]
        generated = chunk.start + chunk.count - len(prompt)
        if generated > 0:
            first = max(0, chunk.start - len(prompt))
            if first == 0:
                sequence.own["frames_made"] = self._rows.frames_made(sequence.row)
            parts.extend(self._again(sequence, step) for step in range(first, generated))
        return torch.cat(parts)

    def _again(self, sequence: RunningSequence, step: int) -> torch.Tensor:
        """(1, hidden_size): the input of decode step `step`, whose frame may have been made."""
        import torch

        row = torch.tensor([sequence.row], device=self._text_table.device)
        token = sequence.token_ids[len(sequence.prompt.token_ids) + step]
        tokens = torch.tensor([token], device=row.device)
        if step >= sequence.own["frames_made"]:
            return self._decode_embeds(row, tokens)
        codes, text = self._rows.frame_again(sequence.row, step)
        embeds = [self.module.model.codec_embedding(tokens)]
        for group, table in enumerate(self._predictor.module.model.codec_embedding, start=1):
            embeds.append(table(codes[:, group]))
        return torch.stack(embeds, dim=1).sum(1) + self._text_table[text]

    def forward(
        self, embeds: torch.Tensor, batch: ModelBatch, arguments: dict[str, Any]
    ) -> ModelOutput:
        from omnistage.ar.model import ModelOutput

        decoder = self.module.model
        output = decoder(inputs_embeds=embeds.unsqueeze(0), use_cache=False, **arguments)
        return ModelOutput(hidden=output.last_hidden_state[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module.codec_head(hidden)
        return logits.masked_fill(self._unspoken, float("-inf"))

    def sampled(self, rows: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        self._rows.hidden[rows] = hidden

    def step_payload(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """codes (len(rows), num_code_groups) int64: the frames that this step's inputs end with."""
        return {"codes": self._rows.codes[rows]}

    def prompt_payload(
        self, sequence: RunningSequence, states: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """No frames, in their shape: the next stage can begin with it."""
        return {"codes": self._rows.codes[:0].clone()}

    def release(self, sequence: RunningSequence) -> None:
        sequence.own.pop("prompt_embeds", None)
        self._rows.release(sequence)


def project_text(module: Any, embeddings: torch.Tensor) -> torch.Tensor:
    """(V, thinker_hidden_size) → (V, hidden_size) on the module's device: the talker's view of
    every text id, so that no step computes it and half the memory does."""
    import torch

    parts = embeddings.split(PROJECTED_AT_ONCE)
    return torch.cat([module.text_projection(part.to(module.device)) for part in parts])
