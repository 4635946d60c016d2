"""Causal convolutions in pieces: hooks that put what came before in front of each piece.

The modules run as they are. Outside of a step the hooks do nothing, so that the same module also
decodes in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(slots=True, kw_only=True, eq=False)
class StreamStep:
    """One batched piece: B streams, the same number of frames each.

    `before` (B,) int64 on the device: frames that each stream has had. `read` is the state by name,
    (B, …); hooks leave the new state in `written`.
    """

    before: torch.Tensor
    read: dict[str, torch.Tensor]
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    _kept: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def is_real(self, lag: int, columns_per_frame: int, count: int) -> torch.Tensor:
        """(B, 1, count): whether a piece's first columns exist in a one-pass decode, whose output
        at this place is `lag` columns late."""
        import torch

        key = (lag, columns_per_frame, count)
        if key not in self._kept:
            first = lag - self.before * columns_per_frame
            columns = torch.arange(count, device=self.before.device)
            self._kept[key] = (columns >= first[:, None])[:, None, :]
        return self._kept[key]


@dataclass(slots=True, kw_only=True, frozen=True)
class Place:
    """Where a module stands: its input has `columns_per_frame` columns for each frame and is `lag`
    columns late against a one-pass decode. Columns before the start must read as zero, as a
    one-pass decode pads."""

    columns_per_frame: int = 1
    lag: int = 0

    def upsampled(self, factor: int, *, late: bool) -> Place:
        return Place(
            columns_per_frame=self.columns_per_frame * factor,
            lag=self.lag * factor + (factor if late else 0),
        )

    def blank(self, columns: torch.Tensor, step: StreamStep) -> None:
        """Set what is before the start of `columns` (B, C, n) to zero, in place."""
        count = min(self.lag, columns.shape[-1])
        if count:
            columns[..., :count] *= step.is_real(self.lag, self.columns_per_frame, count)


class CausalConvs:
    """Follows convolutions of one module. `step` is set while a piece runs."""

    def __init__(self) -> None:
        self.step: StreamStep | None = None
        self._handles: list[Any] = []

    def follow(self, name: str, conv: nn.Conv1d, context: int, place: Place) -> None:
        """A convolution of stride 1 whose caller pads `context` zero columns in front (a tensor of
        its own, so it may be written to): they become the last columns of the piece before."""

        def put_context(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            step = self.step
            if step is None:
                return
            (padded,) = args
            place.blank(padded[..., context:], step)
            padded[..., :context] = step.read[name]
            step.written[name] = padded[..., -context:].clone()

        self._handles.append(conv.register_forward_pre_hook(put_context))

    def follow_transposed(self, name: str, module: nn.Module, place: Place) -> None:
        """A transposed convolution of kernel 2 x stride that drops a stride of columns at either
        end: a block of its output is made of two neighbouring columns, so one comes again."""
        import torch

        def put_column(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
            step = self.step
            if step is None:
                return None
            joined = torch.cat((step.read[name], args[0]), dim=-1)
            place.blank(joined[..., 1:], step)
            step.written[name] = joined[..., -1:].clone()
            return (joined,)

        self._handles.append(module.register_forward_pre_hook(put_column))

    @contextmanager
    def during(self, step: StreamStep) -> Iterator[None]:
        """Calls of the module inside are one piece."""
        self.step = step
        try:
            yield
        finally:
            self.step = None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
