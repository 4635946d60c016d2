"""Times of one child's text and sound on their way to the caller, for the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.tensors import HostTensor
from omnistage.observability.metrics import EngineMetrics
from omnistage.observability.playback import PlaybackClock

COMPLETION_TOKENS = "completion_tokens"
"""The field of a text output with the tokens made so far."""


class OutputMeter:
    """Fed with every output that goes to the caller, as it enters the caller's stream: what the
    network and the client add is theirs. `started_at_s` is the admission, by `clock`."""

    def __init__(self, started_at_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._started_at_s = started_at_s
        self._clock = clock
        self._first_tokens: tuple[float, int] | None = None
        self._playback = PlaybackClock()

    def output(self, data: StageData, metrics: EngineMetrics, *, final: bool) -> None:
        if COMPLETION_TOKENS in data.fields:
            self._text(data, metrics, final=final)
        elif data.modality is Modality.AUDIO:
            self._sound(data, metrics, final=final)

    def _text(self, data: StageData, metrics: EngineMetrics, *, final: bool) -> None:
        now_s, tokens = self._clock(), int(data.fields[COMPLETION_TOKENS])
        if self._first_tokens is None and tokens and not final:
            self._first_tokens = (now_s, tokens)
            metrics.first_token(now_s - self._started_at_s)
        if final:
            metrics.text_finished(
                prompt_tokens=data.fields.get("prompt_tokens", 0),
                cached_tokens=data.fields.get("cached_tokens", 0),
                tokens=tokens,
                per_token_s=self._per_token_s(now_s, tokens),
            )

    def _per_token_s(self, now_s: float, tokens: int) -> float | None:
        if self._first_tokens is None or tokens <= self._first_tokens[1]:
            return None
        since_s, already = self._first_tokens
        return (now_s - since_s) / (tokens - already)

    def _sound(self, data: StageData, metrics: EngineMetrics, *, final: bool) -> None:
        playback, now_s = self._playback, self._clock()
        is_first = playback.pieces == 0
        playback.arrive(now_s, _seconds(data))
        if is_first and playback.pieces:
            metrics.first_sound(now_s - self._started_at_s)
        if final and playback.pieces:
            metrics.sound_finished(
                duration_s=playback.duration_s,
                elapsed_s=now_s - self._started_at_s,
                underrun_s=playback.underrun_s if playback.pieces > 1 else None,
            )


def _seconds(data: StageData) -> float:
    samples, rate_hz = data.tensors.get("audio"), data.fields.get("sample_rate")
    if not isinstance(samples, HostTensor) or not isinstance(rate_hz, int) or rate_hz <= 0:
        return 0.0
    return samples.shape[-1] / rate_hz if samples.shape else 0.0
