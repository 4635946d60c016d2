"""The thinker as a token model, and what it hands to the talker: one state a position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omnistage.ar.media_lm import MediaLM

if TYPE_CHECKING:
    import torch

    from omnistage.ar.media_prompts import MediaPrompts
    from omnistage.ar.model import Chunk, ModelBatch, RunningSequence

STATE = "talker_state"
PROMPT_STATES, REPLY_STATES = "prompt_states", "reply_states"
"""In payloads: (P, hidden_size) of the prompt, (k, hidden_size) of reply tokens."""
SOUND_IN_VIDEO = "use_audio_in_video"
PAYLOAD_MEDIA = (
    "image_grid_thw",
    "video_grid_thw",
    "video_second_per_grid",
    "audio_feature_lengths",
)
"""What else of media the talker's positions follow from."""


class ThinkerModel(MediaLM):
    """`module` is a `Qwen2_5OmniThinkerForConditionalGeneration` built for paged attention.

    With `feeds_talker` it keeps what `Qwen2_5OmniForConditionalGeneration.generate` gives the
    talker: of every position the last hidden state plus the embedding, but of pictures, sounds and
    videos the hidden state alone.
    """

    def __init__(
        self,
        module: Any,
        inputs: MediaPrompts,
        *,
        rows: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        feeds_talker: bool,
    ) -> None:
        size = module.config.text_config.hidden_size
        self.states = {STATE: ((size,), module.dtype)} if feeds_talker else {}
        self._last_states: torch.Tensor | None = None
        if feeds_talker:
            zeros = module.lm_head.weight.new_zeros
            self._last_states = zeros(rows + 1, size, dtype=module.dtype)
        super().__init__(
            module, inputs, rows=rows, eos_token_ids=eos_token_ids, max_model_len=max_model_len
        )

    def states_of(
        self, embeds: torch.Tensor, hidden: torch.Tensor, batch: ModelBatch
    ) -> dict[str, torch.Tensor]:
        if self._last_states is None:
            return {}
        states = hidden + embeds
        for chunk in batch.chunks:
            _leave_out_media(chunk, states, hidden)
        if batch.num_decodes:
            self._last_states[batch.rows] = states[: batch.num_decodes]
        for chunk in batch.chunks:
            self._last_states[chunk.sequence.row] = states[chunk.first + chunk.count - 1]
        return {STATE: states}

    def step_payload(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The states of the tokens that this step's rows were fed with: never of a reply's last."""
        return {} if self._last_states is None else {REPLY_STATES: self._last_states[rows]}

    def prompt_payload(
        self, sequence: RunningSequence, states: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch

        media = sequence.prompt.own["media"]
        payload = {name: media[name] for name in PAYLOAD_MEDIA if name in media}
        payload[SOUND_IN_VIDEO] = torch.tensor([int(media.get(SOUND_IN_VIDEO, False))])
        return {PROMPT_STATES: states[STATE], **payload}


def _leave_out_media(chunk: Chunk, states: torch.Tensor, hidden: torch.Tensor) -> None:
    import numpy as np
    import torch

    places = chunk.sequence.prompt.own["media_places"]
    low, high = np.searchsorted(places, (chunk.start, chunk.start + chunk.count))
    if low < high:
        at = torch.from_numpy(places[low:high] - chunk.start + chunk.first).to(states.device)
        states[at] = hidden[at]
