"""Videos from clients: evenly spaced frames as uint8, and their sound on request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnistage.api.av_input import VIDEO_CODECS, DecodeDeadline, first_stream, opened
from omnistage.api.media_audio import Sound, read_track
from omnistage.api.media_bytes import FileSource
from omnistage.api.settings import ApiSettings
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InvalidRequestError

_MIN_FRAMES = 4
_FRAME_FACTOR = 2
"""Qwen's processors join two frames in time; fewer than four they refuse."""
_WHAT = "video"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """`frames` are uint8 (n, height, width, 3) at `fps` frames a second; `sound` is the audio
    track, where it was asked for."""

    frames: np.ndarray
    fps: float
    sound: Sound | None = None

    def as_input(self) -> tuple[np.ndarray, dict[str, Any]]:
        """What the engine takes under "video" in `multi_modal_data`."""
        sound = None if self.sound is None else self.sound.as_input()
        return self.frames, {"fps": self.fps, "audio": sound}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """`fps` frames a second are taken, never more than `max_frames`: of a longer video they lie
    further apart. Frames with more than `frame_pixels` are made smaller; one with more than
    `max_pixels` is refused before it is decoded. The file may hold `max_file_frames`."""

    fps: float
    max_frames: int
    max_file_frames: int
    frame_pixels: int
    max_pixels: int
    timeout_s: float


def decode_clip(
    data: bytes,
    limits: VideoLimits,
    *,
    sound_rate_hz: int | None = None,
    max_sound_s: float = math.inf,
) -> Clip:
    """The frames of the first video track and, with `sound_rate_hz`, the first audio track.

    Its length is counted from the packets, not read from a header. Raises `InvalidRequestError`.
    """
    deadline = DecodeDeadline(limits.timeout_s)
    with opened(data, _WHAT) as container:
        times_s = _frame_times(container, limits, deadline)
    indices, fps = choose_frames(times_s, limits)
    with opened(data, _WHAT) as container:
        frames = _decode(container, indices, limits, deadline)
    sound = None
    if sound_rate_hz is not None:
        with opened(data, _WHAT) as container:
            sound = read_track(
                container, _WHAT, rate_hz=sound_rate_hz, max_s=max_sound_s, deadline=deadline
            )
    return Clip(frames=frames, fps=fps, sound=sound)


def _frame_times(container: Any, limits: VideoLimits, deadline: DecodeDeadline) -> list[float]:
    """When each frame is shown, in order, in seconds. Nothing is decoded."""
    stream = _video_stream(container, limits)
    times_s: list[float] = []
    for packet in container.demux(stream):
        deadline.check()
        if not packet.size:
            continue
        stamp = packet.pts if packet.pts is not None else packet.dts
        if stamp is None:
            raise InvalidRequestError("the video's frames do not say when they are shown")
        times_s.append(float(stamp * packet.time_base))
        if len(times_s) > limits.max_file_frames:
            raise InvalidRequestError(
                f"the video has more than {limits.max_file_frames} frames, this server's limit "
                "(max_video_file_frames)"
            )
    if not times_s:
        raise InvalidRequestError("the video is empty: it holds not one frame")
    return sorted(times_s)


def _video_stream(container: Any, limits: VideoLimits) -> Any:
    stream = first_stream(container, "video", VIDEO_CODECS, _WHAT)
    codec = stream.codec_context
    _check_pixels(codec.width, codec.height, limits)
    codec.options = {"max_pixels": str(limits.max_pixels)}
    return stream


def _check_pixels(width: int, height: int, limits: VideoLimits) -> None:
    if width * height > limits.max_pixels:
        raise InvalidRequestError(
            f"the video is {width}x{height}, {width * height} pixels a frame; at most "
            f"{limits.max_pixels} are taken (max_input_pixels)"
        )


def choose_frames(times_s: Sequence[float], limits: VideoLimits) -> tuple[list[int], float]:
    """Which frames to take, evenly spread over all, and how many a second that makes.

    An even number, as Qwen's own sampling takes them; a short video gives all that it has.
    """
    total = len(times_s)
    span_s = times_s[-1] - times_s[0]
    duration_s = span_s * total / (total - 1) if total > 1 and span_s > 0 else total / limits.fps
    wanted = min(max(round(duration_s * limits.fps), _MIN_FRAMES), limits.max_frames, total)
    wanted = max(1, wanted // _FRAME_FACTOR * _FRAME_FACTOR)
    indices = np.linspace(0, total - 1, wanted).round().astype(int)
    return [int(index) for index in indices], wanted / duration_s


def _decode(
    container: Any, indices: list[int], limits: VideoLimits, deadline: DecodeDeadline
) -> np.ndarray:
    stream = _video_stream(container, limits)
    wanted, last = set(indices), indices[-1]
    size: tuple[int, int] | None = None
    frames: list[np.ndarray] = []
    for index, frame in enumerate(container.decode(stream)):
        deadline.check()
        if index in wanted:
            _check_pixels(frame.width, frame.height, limits)
            size = size or scaled_size(frame.width, frame.height, limits.frame_pixels)
            picture = frame.to_ndarray(width=size[0], height=size[1], format="rgb24")
            frames.append(upright(picture, frame.rotation))
        if index >= last:
            break
    if not frames:
        raise InvalidRequestError("the video is empty: not one frame could be decoded")
    return np.stack(frames)


def upright(picture: np.ndarray, rotation: int) -> np.ndarray:
    """(height, width, 3) turned as a player shows it: `rotation` degrees counterclockwise, in
    quarters."""
    return np.rot90(picture, round(rotation / 90) % 4)


def scaled_size(width: int, height: int, frame_pixels: int) -> tuple[int, int]:
    """The same shape with at most `frame_pixels`."""
    scale = min(1.0, math.sqrt(frame_pixels / (width * height)))
    return max(1, int(width * scale)), max(1, int(height * scale))


class VideoSource:
    """Reads the videos of a request, within the bounds for one and for all."""

    def __init__(self, settings: ApiSettings, workers: MediaWorkers, files: FileSource) -> None:
        self._settings = settings
        self._workers = workers
        self._files = files

    async def from_urls(
        self, urls: Sequence[tuple[str, str]], *, with_sound: bool = False
    ) -> list[Clip]:
        """`urls` are pairs of parameter name and `data:`, `https:` or `file:` URL. `with_sound`
        (`use_audio_in_video`) reads the audio tracks too; a video without one is an error then."""
        settings = self._settings
        limit = ("max_input_videos", settings.max_input_videos)
        seconds_left, clips = settings.max_input_audio_s, []
        for param, data in await self._files.load_all(urls, "videos", limit):
            try:
                clip = await self._workers.run_bounded(
                    decode_clip,
                    data,
                    self._limits(),
                    sound_rate_hz=settings.input_audio_rate_hz if with_sound else None,
                    max_sound_s=seconds_left,
                )
            except InvalidRequestError as error:
                error.param = error.param or param
                raise
            seconds_left -= clip.sound.seconds if clip.sound else 0.0
            clips.append(clip)
        return clips

    def _limits(self) -> VideoLimits:
        settings = self._settings
        return VideoLimits(
            fps=settings.video_fps,
            max_frames=settings.max_video_frames,
            max_file_frames=settings.max_video_file_frames,
            frame_pixels=settings.video_frame_pixels,
            max_pixels=settings.max_input_pixels,
            timeout_s=settings.media_decode_timeout_s,
        )
