"""Make pictures, text or speech from a prompt, without a server."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.cli.generate_text import (
    SOUND_SUFFIX,
    add_text_arguments,
    is_text_model,
    refuse_text_flags,
    run_text,
)
from omnistage.cli.model_flags import add_model_flags, resolve
from omnistage.cli.parsing import CommandParser
from omnistage.cli.values import at_least_one, number, size
from omnistage.contracts.errors import ConfigurationError
from omnistage.observability.logging import configure_logging

if TYPE_CHECKING:
    from PIL.Image import Image

    from omnistage.contracts.outputs import OmniRequestOutput
    from omnistage.contracts.sampling import OmniDiffusionSamplingParams

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def add_arguments(parser: CommandParser) -> None:
    what = parser.add_argument_group("picture")
    what.add_argument("--prompt", required=True, help="what to make")
    what.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write: png, jpg or webp (out.png), or wav for speech; several get a number",
    )
    what.add_argument("--negative-prompt", metavar="TEXT", help="what to keep out")
    what.add_argument("--size", type=size, metavar="WxH", help="size in pixels")
    what.add_argument("--steps", type=at_least_one, metavar="N", help="denoising steps")
    what.add_argument("--seed", type=int, help="random seed; the same seed, the same picture")
    what.add_argument("--n", type=at_least_one, default=1, help="how many (%(default)s)")
    what.add_argument("--guidance-scale", type=number, metavar="X", help="guidance embedding")
    what.add_argument("--true-cfg-scale", type=number, metavar="X", help="true guidance")
    what.add_argument("--strength", type=number, metavar="X", help="how much to change --image")
    what.add_argument("--scheduler", metavar="CLASS", help="diffusers scheduler class")
    what.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="picture to edit; repeat for more",
    )
    what.add_argument(
        "--extra-args", metavar="JSON", help="further arguments of the pipeline's call"
    )
    what.add_argument("--no-progress", action="store_true", help="show no progress bar")
    add_text_arguments(parser)
    add_model_flags(parser, model_optional=True)


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        _check_output(args.output)
    prompt = _prompt(args)
    params = _params(args)
    config = resolve(args, *_default_log_level(args))
    configure_logging(config.log_level, json=config.log_json)
    if is_text_model(config):
        return run_text(args, config)
    refuse_text_flags(args)
    target = _picture_target(args.output)

    from omnistage.engine.omni import Omni

    with Omni(config=config) as omni:
        (output,) = omni.generate(prompt, params, use_tqdm=not args.no_progress)
    for path in _write(output, target):
        print(path)
    return 0


def _picture_target(path: Path | None) -> Path:
    target = path or Path("out.png")
    if target.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"--output {target}: this model makes pictures, not sound")
    return target


def _default_log_level(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Quieter than a server, so that the progress bar and the path stand out."""
    given = any(name == "log_level" for name, _ in args.overrides)
    return [] if given else [("log_level", "warning")]


def _params(args: argparse.Namespace) -> OmniDiffusionSamplingParams:
    from omnistage.contracts.sampling import OmniDiffusionSamplingParams

    width, height = args.size or (None, None)
    return OmniDiffusionSamplingParams(
        num_outputs_per_prompt=args.n,
        seed=args.seed,
        width=width,
        height=height,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        true_cfg_scale=args.true_cfg_scale,
        strength=args.strength,
        scheduler=args.scheduler,
        extra_args=_extra_args(args.extra_args),
    )


def _extra_args(text: str | None) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigurationError(f"--extra-args is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"--extra-args must be a JSON object, got {text}")
    return values


def _prompt(args: argparse.Namespace) -> Any:
    prompt: dict[str, Any] = {"prompt": args.prompt}
    if args.negative_prompt is not None:
        prompt["negative_prompt"] = args.negative_prompt
    if args.image:
        prompt["multi_modal_data"] = {"image": [read_image(path) for path in args.image]}
    return prompt


def read_image(path: Path) -> Image:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        picture = Image.open(path)
        picture.load()
    except FileNotFoundError:
        raise ConfigurationError(f"--image {path} does not exist") from None
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ConfigurationError(f"--image {path} cannot be read as a picture: {error}") from error
    return ImageOps.exif_transpose(picture)


def _check_output(path: Path) -> None:
    """Before the long work: the file can be written."""
    known = (*FORMATS, SOUND_SUFFIX)
    if path.suffix.lower() not in known:
        close = difflib.get_close_matches(path.suffix.lower(), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"--output {path} must end in one of {', '.join(known)}{hint}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--output {path}: folder {path.parent} does not exist")
    if path.is_dir():
        raise ConfigurationError(f"--output {path} is a folder; name a file")


def _write(output: OmniRequestOutput, path: Path) -> list[Path]:
    if output.error is not None:
        raise output.error
    paths = [path]
    if len(output.images) > 1:
        paths = [
            path.with_name(f"{path.stem}-{index}{path.suffix}")
            for index in range(1, len(output.images) + 1)
        ]
    for picture, target in zip(output.images, paths, strict=True):
        picture.save(target, format=FORMATS[path.suffix.lower()])
    return paths
