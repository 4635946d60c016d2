"""Small sounds and videos as files, and back."""

from __future__ import annotations

import base64
import io
import struct

import av
import numpy as np

from omnistage.api.audio_encode import PCM_RATE_HZ, AudioFormat

RATE_HZ = 24_000


def chirp(seconds: float = 1.0, rate_hz: int = RATE_HZ) -> np.ndarray:
    """A rising tone, nowhere like itself: float32 (n,), RMS about 0.3."""
    times_s = np.arange(int(seconds * rate_hz)) / rate_hz
    return (0.45 * np.sin(2 * np.pi * (200 + 600 * times_s) * times_s)).astype(np.float32)


def decoded(data: bytes, audio_format: AudioFormat, rate_hz: int = RATE_HZ) -> np.ndarray:
    """By FFmpeg itself, apart from `omnistage.api.media_audio`."""
    if audio_format == "pcm":
        assert rate_hz == PCM_RATE_HZ
        return np.frombuffer(data, "<i2").astype(np.float32) / 32_767
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate_hz)
    with av.open(io.BytesIO(data)) as container:
        frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])


def best_correlation(sound: np.ndarray, reference: np.ndarray, max_delay: int = 2600) -> float:
    """Of the middle of `reference` with `sound`, at the delay that fits best."""
    middle = reference[len(reference) // 4 : len(reference) // 2]
    windows = np.lib.stride_tricks.sliding_window_view(sound, len(middle))
    windows = windows[max(0, len(reference) // 4 - max_delay) : len(reference) // 4 + max_delay]
    scores = windows @ middle / (np.linalg.norm(windows, axis=1) * np.linalg.norm(middle) + 1e-9)
    return float(scores.max())


def float_wav(samples: np.ndarray, rate_hz: int = 16_000) -> bytes:
    data = samples.astype("<f4").tobytes()
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 3, 1, rate_hz, rate_hz * 4, 4, 32),
        *(b"data", len(data)),
    )
    return head + data


def video_file(
    *,
    frames: int = 50,
    size: tuple[int, int] = (64, 48),
    fps: int = 10,
    codec: str = "libx264",
    container: str = "mp4",
    sound_s: float | None = 1.0,
) -> bytes:
    """Frame i is grey of level 5·i; the sound is a constant 0.1."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        sound = None
        if sound_s is not None:
            sound = out.add_stream("aac" if container == "mp4" else "libopus", rate=48_000)
            sound.layout = "mono"
        for index in range(frames):
            level = min(255, index * 5)
            picture = np.full((size[1], size[0], 3), level, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = index
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if sound is not None:
            level_s = np.full((1, int(48_000 * (sound_s or 0))), 0.1, np.float32)
            tone = av.AudioFrame.from_ndarray(level_s, format="fltp", layout="mono")
            tone.sample_rate, tone.pts = 48_000, 0
            out.mux(sound.encode(tone))
            out.mux(sound.encode(None))
    return file.getvalue()


def data_url(data: bytes, kind: str = "audio/wav") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
