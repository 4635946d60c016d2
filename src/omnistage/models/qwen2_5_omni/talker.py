"""The talker as a token model: one codec id a step, conditioned on the thinker's reply as it
streams in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnistage.ar.gate import observe_layers
from omnistage.ar.mrope import RopeRows
from omnistage.contracts.tensors import host_tensor
from omnistage.models.qwen2_5_omni.codes import SEED, STREAMED, VOICE
from omnistage.models.qwen2_5_omni.talker_rows import TalkerRows
from omnistage.models.qwen2_5_omni.thinker import REPLY_STATES

if TYPE_CHECKING:
    import torch

    from omnistage.ar.cache_spec import LayerSpec
    from omnistage.ar.model import Chunk, ModelBatch, ModelOutput, RunningSequence
    from omnistage.ar.prompt import MediaItem, PreparedPrompt
    from omnistage.contracts.payloads import StageData
    from omnistage.contracts.sampling import OmniTokenSamplingParams
    from omnistage.models.qwen2_5_omni.talker_prompt import Reply, TalkerPrompts


class TalkerModel:
    """`module` is a `Qwen2_5OmniTalkerForConditionalGeneration` built for paged attention.

    `text_embeds` are the thinker's embeddings (embedding_size,) by text id: of the ids that open
    speech, and of the config's end and pad. Ids from `num_codes` on, which the vocoder has no
    embedding for, are never sampled but for the ends.
    """

    tokenizer = None
    position_rows = 3

    def __init__(
        self,
        module: Any,
        text_embeds: dict[int, torch.Tensor],
        prompts: TalkerPrompts,
        *,
        rows: int,
        max_model_len: int,
        num_codes: int,
    ) -> None:
        import torch

        config = module.config
        self.module = module
        self.num_layers: int = config.num_hidden_layers
        self.states: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = frozenset(
            (config.tts_codec_pad_token_id, config.tts_codec_end_token_id)
        )
        """The two defaults of `generate`'s `talker_eos_token_id`, 8292 and 8294."""
        self.max_model_len = max_model_len
        self._prompts = prompts
        self._text_embeds = text_embeds
        pad = text_embeds[config.tts_text_pad_token_id]
        self._rope = RopeRows(rows + 1, pad.device)
        self._rows = TalkerRows(
            rows + 1,
            min(prompts.max_codes, max_model_len),
            end=text_embeds[config.tts_text_end_token_id],
            pad=pad,
        )
        ids = torch.arange(config.vocab_size)
        unspoken = (ids >= num_codes) | (ids == config.tts_codec_start_token_id)
        unspoken[list(self.eos_token_ids)] = False
        self._unspoken = unspoken.to(pad.device)
        self.layers: tuple[LayerSpec, ...] = observe_layers(self)

    def probe_prompts(self, lengths: Sequence[int]) -> list[PreparedPrompt]:
        """For the gate at load."""
        return [self._prompts.probe(length) for length in lengths]

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        return self._prompts.prepare(data, params)

    def encode(self, items: Sequence[MediaItem]) -> list[Any]:
        raise NotImplementedError("a talker has no encoders")

    def begin(self, sequence: RunningSequence) -> None:
        self._rope.begin(sequence)
        reply: Reply = sequence.prompt.own["reply"]
        self._rows.begin(sequence.row)
        self._rows.write(sequence.row, reply, 0)
        sequence.own["prompt_embeds"] = self._prompt_embeds(sequence.prompt.own)

    def append(self, sequence: RunningSequence, data: StageData) -> None:
        if REPLY_STATES not in data.tensors:
            return
        reply: Reply = sequence.prompt.own["reply"]
        first = len(reply)
        device = self._rows.pad.device
        states = host_tensor(data.tensors[REPLY_STATES]).torch()
        reply.states.append(states.to(device, self._rows.pad.dtype))
        self._rows.write(sequence.row, reply, first)
        if first == 0:
            sequence.own["prompt_embeds"] = self._prompt_embeds(sequence.prompt.own)

    def finish_input(self, sequence: RunningSequence) -> None:
        reply: Reply = sequence.prompt.own["reply"]
        reply.complete = True
        self._rows.write(sequence.row, reply, len(reply))

    def _prompt_embeds(self, own: dict[str, Any]) -> torch.Tensor:
        """(P, embedding_size): the thinker's states, the voice's opening, the reply's first state;
        codec tokens are added to the last two where they open speech. A reply without a state is
        its end mark."""
        import torch

        config, pad = self.module.config, self._rows.pad
        reply: Reply = own["reply"]
        end = self._text_embeds[config.tts_text_end_token_id]
        first = reply.states[0][0].to(pad.device, pad.dtype) if len(reply) else end
        opening = torch.stack((self._text_embeds[own["bos_id"]], first))
        if self._prompts.opens_speech:
            codec_ids = [config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
            opening += self.module.model.embed_tokens(torch.tensor(codec_ids, device=pad.device))
        return torch.cat((own["prompt_states"].to(pad.device, pad.dtype), opening))

    def chunk_positions(self, sequence: RunningSequence, start: int, count: int) -> torch.Tensor:
        return self._rope.chunk(sequence, start, count)

    def embed(self, batch: ModelBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        import torch

        parts = [self._chunk_embeds(chunk) for chunk in batch.chunks]
        if batch.num_decodes:
            codecs = self.module.model.embed_tokens(batch.token_ids[: batch.num_decodes])
            parts.insert(0, codecs + self._rows.next_state(batch.rows))
        projected = self.module.thinker_to_talker_proj(torch.cat(parts))
        return projected, {"position_ids": self._rope.of_batch(batch)}

    def _chunk_embeds(self, chunk: Chunk) -> torch.Tensor:
        """A prompt's part, and, after a preemption, what was generated before it."""
        import torch

        sequence = chunk.sequence
        prompt: torch.Tensor = sequence.own["prompt_embeds"]
        end = chunk.start + chunk.count
        parts = [prompt[chunk.start : end]]
        if end > len(prompt):
            first = max(chunk.start, len(prompt))
            ids = torch.tensor(sequence.token_ids[first:end], device=prompt.device)
            states = self._rows.states_again(sequence.row, first - len(prompt), end - len(prompt))
            parts.append(self.module.model.embed_tokens(ids) + states)
        return torch.cat(parts)

    def forward(
        self, embeds: torch.Tensor, batch: ModelBatch, arguments: dict[str, Any]
    ) -> ModelOutput:
        from omnistage.ar.model import ModelOutput

        decoder = self.module.model
        output = decoder(inputs_embeds=embeds.unsqueeze(0), use_cache=False, **arguments)
        return ModelOutput(hidden=output.last_hidden_state[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module.codec_head(hidden).float()
        return logits.masked_fill(self._unspoken, float("-inf"))

    def sampled(self, rows: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        return None

    def step_payload(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def prompt_payload(
        self, sequence: RunningSequence, states: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the sound depends on beside codes: see `codes`."""
        import torch

        told = {
            VOICE: sequence.prompt.own["voice_place"],
            SEED: sequence.seed,
            STREAMED: int(sequence.params.delta),
        }
        return {name: torch.tensor([value]) for name, value in told.items()}

    def release(self, sequence: RunningSequence) -> None:
        sequence.own.pop("prompt_embeds", None)
