"""The talker's device state, a row a running sequence: what its decode steps add to codec ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from omnistage.models.qwen2_5_omni.talker_prompt import Reply


class TalkerRows:
    """For `capacity` decode steps of each row the state (embedding_size,) that the step adds: of
    the reply's second token on, then `end`, then `pad`."""

    def __init__(self, rows: int, capacity: int, *, end: torch.Tensor, pad: torch.Tensor) -> None:
        import torch

        self.end, self.pad = end, pad
        self._capacity = capacity
        self._states = pad.repeat(rows, capacity, 1)
        self._steps = torch.zeros(rows, dtype=torch.int64, device=pad.device)

    def begin(self, row: int) -> None:
        self._states[row] = self.pad
        self._steps[row] = 0

    def write(self, row: int, reply: Reply, first: int) -> None:
        """The reply's states from number `first` on, and its end. What lies beyond the capacity is
        never read: no request may make so many codes."""
        at = first
        for states in _from(reply, first):
            self._put(row, at - 1, states)
            at += len(states)
        if reply.complete and at:  # Without a state the end mark is part of the prompt.
            self._put(row, at - 1, self.end[None])

    def _put(self, row: int, at: int, states: torch.Tensor) -> None:
        """The reply's first state is part of the prompt."""
        states = states[max(0, -at) : max(0, self._capacity - at)]
        at = max(at, 0)
        self._states[row, at : at + len(states)] = states.to(self._states)

    def next_state(self, rows: torch.Tensor) -> torch.Tensor:
        """(S, embedding_size) for the next decode step of `rows` (S,). Capturable."""
        steps = self._steps[rows]
        self._steps[rows] = steps + 1
        return self._states[rows, steps.clamp(max=self._capacity - 1)]

    def states_again(self, row: int, first: int, last: int) -> torch.Tensor:
        """Those of decode steps `first` … `last` - 1; the next one is `last`."""
        self._steps[row] = last
        return self._states[row, first:last]


def _from(reply: Reply, first: int) -> list[torch.Tensor]:
    found, at = [], 0
    for states in reply.states:
        if at + len(states) > first:
            found.append(states[max(0, first - at) :])
        at += len(states)
    return found
