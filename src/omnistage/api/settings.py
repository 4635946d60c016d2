"""What the HTTP side allows, fixed at start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from omnistage.api.parser_names import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ReasoningParser,
    ToolParserName,
)
from omnistage.contracts.errors import ConfigurationError
from omnistage.contracts.sampling import MAX_GENERATED_PIXELS

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Bounds and switches of the server. Raises `ConfigurationError` on a bound that is not
    above 0, or not finite.

    Without `api_keys` every client may call. `max_open_body_bytes` bounds the bodies of all open
    requests together. `max_input_*` and `max_media_bytes` hold for one
    input picture, `max_total_input_pixels` and `max_body_bytes` for all pictures of a request.
    `media_timeout_s` bounds the fetching of all of them together, redirects included.

    Sounds arrive at the model with `input_audio_rate_hz`; `max_input_audio_s` holds for all sounds
    of a request together. Of a video, `video_fps` frames a second are taken, at most
    `max_video_frames` spread evenly, each scaled down to `video_frame_pixels`; its file may hold
    `max_video_file_frames`. `media_decode_timeout_s` bounds the reading of one sound or video.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 64 * MIB
    body_timeout_s: float = 60.0
    max_open_requests: int = 512
    max_open_body_bytes: int = 1024 * MIB
    max_pixels: int = MAX_GENERATED_PIXELS
    max_steps: int = 200
    max_n: int = 10
    max_choices: int = 128
    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParser = "auto"
    max_prompt_chars: int = 32_000
    max_speech_chars: int = 4096
    max_input_images: int = 16
    max_input_pixels: int = MAX_GENERATED_PIXELS
    max_total_input_pixels: int = 4 * MAX_GENERATED_PIXELS
    max_media_bytes: int = 32 * MIB
    max_input_audios: int = 16
    max_input_audio_s: float = 300.0
    input_audio_rate_hz: int = 16_000
    max_input_videos: int = 4
    video_fps: float = 2.0
    max_video_frames: int = 128
    max_video_file_frames: int = 20_000
    video_frame_pixels: int = 768 * 32 * 32
    media_timeout_s: float = 20.0
    media_decode_timeout_s: float = 30.0
    max_redirects: int = 3
    allow_http_media: bool = False
    allow_private_media: bool = False
    allowed_local_media_path: Path | None = None
    media_threads: int = 2
    max_pending_decodes: int = 64
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not 0 < value < math.inf and name != "max_redirects":
                raise ConfigurationError(f"{name} is {value}; it must be a number greater than 0")
        for name, known in (
            ("tool_call_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)!r}; allowed: {', '.join(known)}"
                )
        if any(not key for key in self.api_keys):
            raise ConfigurationError("an API key is empty; give every key at least one character")
        root = self.allowed_local_media_path
        if root is not None and not root.is_dir():
            raise ConfigurationError(
                f"--allowed-local-media-path {root} is no directory; give an existing directory"
            )
