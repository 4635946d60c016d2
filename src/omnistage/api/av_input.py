"""Opening a stranger's sound or video with FFmpeg's libraries. Runs in a worker thread.

Only formats and codecs listed here are tried, and nothing but the bytes given is ever opened:
playlists and references to other files lead nowhere.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av

from omnistage.contracts.errors import InvalidRequestError, OmniError

CONTAINERS = ("wav", "w64", "mp3", "flac", "ogg", "aac", "mov", "mp4", "matroska", "webm", "avi")
AUDIO_CODECS = frozenset(
    {"aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "libvorbis"}
    | {"pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_f32le"}
    | {"pcm_f64le", "pcm_alaw", "pcm_mulaw", "adpcm_ms", "adpcm_ima_wav"}
)
VIDEO_CODECS = frozenset(
    {"h264", "hevc", "vp8", "libvpx", "vp9", "libvpx-vp9", "av1", "libdav1d", "mpeg4", "mjpeg"}
    | {"mpeg1video", "mpeg2video", "theora"}
)


class DecodeDeadline:
    """How long one file may keep a worker."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends_at_s = time.monotonic() + limit_s

    def check(self) -> None:
        if time.monotonic() > self._ends_at_s:
            raise InvalidRequestError(
                f"reading the file takes longer than this server's limit of {self._limit_s:g} s "
                "(media_decode_timeout_s)"
            )


@contextmanager
def opened(data: bytes, what: str) -> Iterator[Any]:
    """The file as an `av` container. Raises `InvalidRequestError`, also for what is raised inside
    about a broken file; `what` names it to the client."""
    try:
        container = av.open(
            io.BytesIO(data),
            container_options={
                "format_whitelist": ",".join(CONTAINERS),
                "codec_whitelist": ",".join(sorted(AUDIO_CODECS | VIDEO_CODECS)),
                "protocol_whitelist": "",
            },
            io_open=_refuse_to_open,
        )
    except av.MemoryError:
        raise
    except (av.FFmpegError, ValueError) as error:
        raise InvalidRequestError(
            f"the data is no {what} of a known format; read are: {', '.join(CONTAINERS)}"
        ) from error
    with container:
        try:
            yield container
        except (OmniError, MemoryError):
            raise
        except (av.FFmpegError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"the {what} is truncated or corrupt") from error


def _refuse_to_open(url: str, flags: int, options: dict[str, str]) -> Any:
    raise ValueError("a file that refers to another one is not read")


def first_stream(container: Any, kind: str, codecs: frozenset[str], what: str) -> Any:
    """The first stream of that kind, decoded in this thread only. Raises `InvalidRequestError`."""
    streams = [stream for stream in container.streams if stream.type == kind]
    if not streams:
        raise InvalidRequestError(f"the {what} has no {kind} track")
    stream = streams[0]
    codec = stream.codec_context
    if codec is None or codec.name not in codecs:
        name = "unknown" if codec is None else codec.name
        raise InvalidRequestError(
            f"the {what} is in the codec {name!a}; read are: {', '.join(sorted(codecs))}"
        )
    codec.thread_count = 1
    return stream
