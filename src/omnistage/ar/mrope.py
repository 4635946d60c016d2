"""Positions of text, pictures, sound and video in three dimensions, as the model computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from omnistage.ar.model import ModelBatch, RunningSequence


@dataclass(slots=True, eq=False)
class Positions:
    """values (3, P) float32 of a prompt's positions; `delta` is added to an index behind them.
    Videos at odd frame rates have positions between whole numbers."""

    values: torch.Tensor
    delta: float

    def span(self, start: int, count: int) -> torch.Tensor:
        """(3, count) float32 from index `start` on, also behind the prompt."""
        import torch

        prompt = self.values[:, start : start + count]
        missing = count - prompt.shape[1]
        if missing <= 0:
            return prompt
        first = max(start, self.values.shape[1])
        behind = torch.arange(first, first + missing, dtype=torch.float32) + self.delta
        return torch.cat((prompt, behind.expand(3, -1)), dim=1)

    @property
    def whole_delta(self) -> int:
        return int(self.delta // 1)

    @property
    def fraction(self) -> float:
        """What `whole_delta` leaves."""
        return self.delta - self.whole_delta


def plain(length: int) -> Positions:
    """Those of text: equal in all dimensions, one apart."""
    import torch

    return Positions(torch.arange(length, dtype=torch.float32).expand(3, -1), 0.0)


class RopeIndex:
    """`get_rope_index` of a family of `transformers` without a model: `owner` is the class that has
    it, `config` the thinker's or the talker's, `spatial_merge_size` its encoder's. Needs no device
    and may run in any thread."""

    def __init__(self, owner: type, config: Any, spatial_merge_size: int) -> None:
        self.config = config
        self.spatial_merge_size = spatial_merge_size
        self._owner: Any = owner

    def get_llm_pos_ids_for_vision(self, *args: Any) -> torch.Tensor:
        found: torch.Tensor = self._owner.get_llm_pos_ids_for_vision(self, *args)
        return found

    def get_chunked_index(self, *args: Any) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = self._owner.get_chunked_index(self, *args)
        return found

    def positions(self, token_ids: list[int], media: dict[str, torch.Tensor]) -> Positions:
        """`media` as the processor names them: image_grid_thw, video_grid_thw (n, 3),
        video_second_per_grid (n,), audio_feature_lengths (n,), each only where there are such
        media; "use_audio_in_video" true where sound is interleaved with its video."""
        import torch

        if not media:
            return plain(len(token_ids))
        ids = torch.tensor([token_ids])
        values, delta = self._owner.get_rope_index(
            self,
            ids,
            image_grid_thw=media.get("image_grid_thw"),
            video_grid_thw=media.get("video_grid_thw"),
            attention_mask=torch.ones_like(ids),
            use_audio_in_video=bool(media.get("use_audio_in_video", False)),
            audio_seqlens=media.get("audio_feature_lengths"),
            second_per_grids=media.get("video_second_per_grid"),
        )
        return Positions(values[:, 0].float(), float(delta.flatten()[0]))


class RopeRows:
    """What the device needs to know of each running sequence's positions, by row: the part of its
    delta that is no whole number. `own["positions"]` of its prompt are its `Positions`."""

    def __init__(self, rows: int, device: Any) -> None:
        import torch

        self._fractions = torch.zeros(rows, dtype=torch.float32, device=device)

    def begin(self, sequence: RunningSequence) -> None:
        positions: Positions = sequence.prompt.own["positions"]
        sequence.position_delta = positions.whole_delta
        self._fractions[sequence.row] = positions.fraction

    def chunk(self, sequence: RunningSequence, start: int, count: int) -> torch.Tensor:
        """(3, count) int64: `of_batch` adds what whole numbers lose."""
        positions: Positions = sequence.prompt.own["positions"]
        return positions.span(start, count).floor().long()

    def of_batch(self, batch: ModelBatch) -> torch.Tensor:
        """(3, 1, T) float32. Capturable without chunks."""
        import torch

        values = batch.positions.to(torch.float32, copy=True)
        if batch.num_decodes:
            values[:, : batch.num_decodes] += self._fractions[batch.rows]
        for chunk in batch.chunks:
            positions: Positions = chunk.sequence.prompt.own["positions"]
            exact = positions.span(chunk.start, chunk.count)
            if not torch.equal(exact, exact.floor()):
                values[:, chunk.first : chunk.first + chunk.count] = exact.to(values.device)
        return values.unsqueeze(1)
