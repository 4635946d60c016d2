"""Samples as FFmpeg's frames, and their rate."""

from __future__ import annotations

import av
import numpy as np

from omnistage.contracts.errors import InternalError


def checked_samples(samples: np.ndarray) -> np.ndarray:
    """float32 (n,) within [-1, 1]. Raises `InternalError` for samples that are no numbers."""
    samples = np.ascontiguousarray(samples, dtype=np.float32).reshape(-1)
    if not np.isfinite(samples).all():
        raise InternalError(
            "the model made sound that holds no numbers; ask again or with other parameters"
        )
    return samples.clip(-1.0, 1.0)


def frame_of(samples: np.ndarray, sample_rate: int, position: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate = sample_rate
    frame.pts = position
    return frame


def joined(frames: list[av.AudioFrame]) -> np.ndarray:
    pieces = [frame.to_ndarray().reshape(-1) for frame in frames if frame.samples]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


class Resampler:
    """Carries its state over the pieces: no seams."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._from_hz = from_hz
        self._position = 0
        self._inner = None
        if from_hz != to_hz:
            self._inner = av.AudioResampler(format="fltp", layout="mono", rate=to_hz)

    def push(self, samples: np.ndarray) -> np.ndarray:
        if self._inner is None or not len(samples):
            return samples
        frame = frame_of(samples, self._from_hz, self._position)
        self._position += len(samples)
        return joined(self._inner.resample(frame))

    def finish(self) -> np.ndarray:
        if self._inner is None or not self._position:
            return np.zeros(0, np.float32)
        return joined(self._inner.resample(None))
