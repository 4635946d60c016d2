"""Start the OpenAI-compatible server for a model. Stops on Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.api.parser_names import REASONING_PARSERS, TOOL_PARSERS
from omnistage.cli.model_flags import add_model_flags, resolve
from omnistage.cli.parsing import CommandParser
from omnistage.cli.values import at_least_one, number, size
from omnistage.config.describe import describe
from omnistage.observability.logging import configure_logging, get_logger

if TYPE_CHECKING:
    from omnistage.api.settings import ApiSettings

logger = get_logger(__name__)

API_KEY_VARIABLE = "OMNISTAGE_API_KEY"

_COUNTS = {
    "max_steps": "most denoising steps a request may ask for",
    "max_n": "most pictures a request may ask for",
    "max_choices": "most answers a request for text may ask for, over all its prompts",
    "max_prompt_chars": "longest prompt of a picture",
    "max_body_bytes": "largest request body",
    "max_open_requests": "HTTP requests open at a time",
    "max_input_images": "most input pictures of a request",
    "max_input_audios": "most input sounds of a request",
    "max_input_videos": "most input videos of a request",
    "max_video_frames": "most frames that are taken of an input video",
    "max_video_file_frames": "longest input video, in frames of its file",
    "video_frame_pixels": "pixels that larger frames of an input video are scaled down to",
    "max_speech_chars": "longest text to speak",
    "max_media_bytes": "largest input picture, sound or video, as a file",
    "media_threads": "threads that decode input media and encode sound",
}
_SECONDS = {
    "body_timeout_s": "how long a client may take to send its body",
    "media_timeout_s": "how long fetching input media may take",
    "media_decode_timeout_s": "how long reading one input sound or video may take",
    "max_input_audio_s": "longest input sound, all of a request together",
    "drain_timeout_s": "how long running requests may go on after the first stop signal",
}
_SWITCHES = {
    "allow_private_media": "fetch input media from private and loopback addresses too",
    "allow_http_media": "fetch input media over http too, not only https",
}


_PARSERS = {
    "tool_call_parser": (TOOL_PARSERS, "how calls of tools are read"),
    "reasoning_parser": (REASONING_PARSERS, "how thoughts are split from answers"),
}


def add_arguments(parser: CommandParser) -> None:
    http = parser.add_argument_group("server")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    http.add_argument(
        "--port", type=int, default=8000, help="port to listen on, 0 for a free one (%(default)s)"
    )
    http.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"key that clients must send; repeat for more (without it: {API_KEY_VARIABLE})",
    )
    http.add_argument(
        "--max-generated-image-size",
        type=size,
        metavar="WxH",
        help="largest picture a request may ask for, by pixels (7680x4320)",
    )
    for name, meaning in _COUNTS.items():
        http.add_argument(_flag(name), type=at_least_one, metavar="N", help=_help(name, meaning))
    for name, meaning in _SECONDS.items():
        http.add_argument(_flag(name), type=number, metavar="S", help=_help(name, meaning))
    http.add_argument(
        "--video-fps",
        type=number,
        metavar="N",
        help=_help("video_fps", "frames that are taken of a second of an input video"),
    )
    for name, meaning in _SWITCHES.items():
        http.add_argument(_flag(name), action="store_true", default=None, help=meaning)
    for name, (known, meaning) in _PARSERS.items():
        http.add_argument(
            _flag(name),
            choices=known,
            metavar="NAME",
            help=f"{meaning}: {', '.join(known)} (auto: as the chat template says)",
        )
    http.add_argument(
        "--allowed-local-media-path",
        type=Path,
        metavar="DIR",
        help="folder that file: input media may come from",
    )
    http.add_argument("--stop-with-stdin", action="store_true", help="stop when stdin closes")
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    settings = api_settings(args)
    config = resolve(args, *_pixel_override(args))
    configure_logging(config.log_level, json=config.log_json)
    logger.info("starting %s from %s", config.served_model_name, config.model_path)
    logger.debug("%s", describe(config))

    from omnistage.api.server import run_server
    from omnistage.engine.async_omni import AsyncOmni

    if args.stop_with_stdin:
        threading.Thread(target=_stop_at_end_of_stdin, name="stdin", daemon=True).start()
    return run_server(
        lambda: AsyncOmni(config=config), host=args.host, port=args.port, settings=settings
    )


def api_settings(args: argparse.Namespace) -> ApiSettings:
    """The bounds of the server; what no flag sets keeps the default."""
    from omnistage.api.settings import ApiSettings

    names = [*_COUNTS, *_SECONDS, *_SWITCHES, *_PARSERS, "video_fps", "allowed_local_media_path"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.max_generated_image_size is not None:
        width, height = args.max_generated_image_size
        given["max_pixels"] = width * height
    keys = args.api_key or [key for key in [os.environ.get(API_KEY_VARIABLE)] if key]
    return ApiSettings(api_keys=tuple(keys), **given)


def _pixel_override(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The stage checks the same bound again, before it allocates anything."""
    if args.max_generated_image_size is None:
        return []
    width, height = args.max_generated_image_size
    return [("options.max_pixels", str(width * height))]


def _stop_at_end_of_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _help(name: str, meaning: str) -> str:
    from omnistage.api.settings import ApiSettings

    default = getattr(ApiSettings, name)
    return f"{meaning} ({round(default) if name.endswith('_s') else default})"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
