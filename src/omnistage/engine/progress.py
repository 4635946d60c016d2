"""A progress bar over all prompts of one call, in denoising steps where a stage reports them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from omnistage.contracts.outputs import OmniRequestOutput


class ProgressReport:
    """Counts prompts; a request in progress counts as the fraction of its steps that is done."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = self._make_bar(total) if enabled else None
        self._done: dict[str, float] = {}

    @staticmethod
    def _make_bar(total: int) -> tqdm[Any]:
        return tqdm(
            total=total,
            unit="prompt",
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n:.2f}/{total} [{elapsed}<{remaining}]",
            desc="generating",
        )

    def update(self, event: OmniRequestOutput) -> None:
        if event.progress is None or self._bar is None:
            return
        fraction = event.progress.step / max(1, event.progress.total_steps)
        self._advance(event.request_id, min(fraction, 1.0))

    def finish(self, request_id: str) -> None:
        self._advance(request_id, 1.0)

    def _advance(self, request_id: str, fraction: float) -> None:
        if self._bar is None or fraction <= self._done.get(request_id, 0.0):
            return
        self._done[request_id] = fraction
        total = min(round(sum(self._done.values()), 6), float(self._bar.total))
        self._bar.update(max(0.0, total - self._bar.n))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
