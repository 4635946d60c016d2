"""The talker's device state, a row a running sequence: what the next decode step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.ar.host_tensors import to_device

if TYPE_CHECKING:
    import torch

    from omnistage.ar.model import RunningSequence

OVERRUN = 2
"""Decode steps of a sequence that the host may not have heard of yet."""


@dataclass(slots=True, eq=False)
class Saved:
    """Of a sequence that lost its row: `frames` (n, groups) int32 of its first `steps` decode steps
    (one int64 on the device) and the last `hidden` (hidden_size,)."""

    frames: torch.Tensor
    steps: torch.Tensor
    hidden: torch.Tensor


class TalkerRows:
    """hidden (rows, hidden_size): what the row's last token was sampled from. codes (rows, groups)
    int64: the last frame. steps (rows,) int64: decode steps made. Texts and frames are kept for
    `capacity` decode steps a row; behind the known text a row reads `pad_id`. `hidden_like` gives
    dtype, device and hidden_size."""

    def __init__(
        self, *, rows: int, capacity: int, groups: int, hidden_like: torch.Tensor, pad_id: int
    ) -> None:
        import torch

        device = hidden_like.device
        self.hidden = hidden_like.new_zeros(rows, hidden_like.shape[1])
        self.codes = torch.zeros(rows, groups, dtype=torch.int64, device=device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self._texts = torch.full((rows, capacity), pad_id, dtype=torch.int64, device=device)
        self._frames = torch.zeros(rows, capacity, groups, dtype=torch.int32, device=device)
        self._pad_id = pad_id
        self._capacity = capacity

    def begin(self, sequence: RunningSequence) -> None:
        """Text is written next. A sequence that starts over goes on where it was, in the same row
        or, after `release`, in another."""
        row = sequence.row
        self._texts[row] = self._pad_id
        if sequence.own.get("holds_row"):
            return
        sequence.own["holds_row"] = True
        self.steps[row] = 0
        saved: Saved | None = sequence.prompt.own.pop("saved", None)
        if saved is not None:
            self.hidden[row] = saved.hidden
            self.steps[row] = saved.steps
            self._frames[row, : len(saved.frames)] = saved.frames

    def write_text(self, row: int, first: int, ids: list[int]) -> None:
        """Text ids for decode steps from `first` on; beyond the capacity nothing is read."""
        import torch

        known = ids[: max(0, self._capacity - 1 - first)]
        written = to_device(known, torch.int64, self._texts.device)
        self._texts[row, first : first + len(known)] = written

    def next_frame(self, rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Keep the frames (S, groups) of one decode step of `rows` (S,); returns the text ids (S,)
        that go with it. Capturable."""
        steps = self.steps[rows]
        places = steps.clamp(max=self._capacity - 1)
        self.codes[rows] = codes
        self._frames[rows, places] = codes.to(self._frames.dtype)
        self.steps[rows] = steps + 1
        return self._texts[rows, places]

    def frames_made(self, row: int) -> int:
        """Decode steps that the row has run. Waits for the device."""
        return int(self.steps[row])

    def frame_again(self, row: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The frame (1, groups) int64 that decode step `step` made and its text id (1,); the next
        decode step is the one behind it."""
        codes = self._frames[row, step : step + 1].long()
        self.codes[row] = codes[0]
        self.steps[row] = step + 1
        return codes, self._texts[row, step : step + 1]

    def release(self, sequence: RunningSequence) -> None:
        """Keep with the prompt, on the device, what a later `begin` needs."""
        row = sequence.row
        sequence.own.pop("holds_row", None)
        known = len(sequence.token_ids) - len(sequence.prompt.token_ids) + OVERRUN
        sequence.prompt.own["saved"] = Saved(
            frames=self._frames[row, : max(known, 0)].clone(),
            steps=self.steps[row].clone(),
            hidden=self.hidden[row].clone(),
        )
