"""For which request and which device `omnistage plan` plans."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from omnistage.cli.model_flags import overrides
from omnistage.cli.parsing import CommandParser
from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from omnistage.memory.planning.facts import DeviceFacts
    from omnistage.memory.planning.shape import RequestShape

AS_IF_DEVICE = "cuda:0"
GIB_BYTES = 2**30


def add_plan_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group(
        "what to plan for", "Of diffusion stages; left out: the stage's defaults, else 1024x1024."
    )
    group.add_argument("--size", metavar="WxH", help="size of a picture, width first")
    for name, what in (
        ("height", "height of a picture"),
        ("width", "width of a picture"),
        ("frames", "frames of a video"),
        ("steps", "denoising steps"),
        ("requests", "requests at a time"),
    ):
        group.add_argument(f"--{name}", type=_count, metavar="N", help=what)
    group.add_argument(
        "--device-memory-gib",
        type=_gib,
        metavar="GIB",
        help="plan as if for a GPU of this size, whether or not one is here",
    )
    group.add_argument(
        "--link-gib-s", type=_gib, metavar="GIB", help="with it: GiB a second from host to device"
    )
    group.add_argument(
        "--host-memory-gib", type=_gib, metavar="GIB", help="with it: host memory that is free"
    )
    group.add_argument(
        "--device-label", metavar="NAME", help="with it: kind of GPU (H200, A100, L40S, …)"
    )


def resolve_as_if(args: argparse.Namespace) -> OmniConfig:
    """The configuration, for a device that need not be here. Raises what a stage's runtime would
    refuse there, as `resolve` does here."""
    from omnistage.engine.configure import configure
    from omnistage.stages.imports import load_object

    config = configure(args.model, deploy_config=args.deploy_config, overrides=overrides(args))
    stages = tuple(
        replace(stage, devices=(AS_IF_DEVICE,) * len(stage.devices)) for stage in config.stages
    )
    for stage in stages:
        load_object(stage.stage.runtime).scheduler(stage)
    return replace(config, stages=stages)


def facts_for(stage: ResolvedStage, args: argparse.Namespace) -> DeviceFacts:
    from omnistage.memory.planning.facts import assume_facts, find_facts
    from omnistage.platforms import host_memory
    from omnistage.platforms.registry import platform_of

    if args.device_memory_gib is None:
        if any((args.link_gib_s, args.host_memory_gib, args.device_label)):
            raise ConfigurationError(
                "--link-gib-s, --host-memory-gib and --device-label describe a machine that need "
                "not be here; add --device-memory-gib"
            )
        return find_facts(platform_of(stage.devices[0]), stage.devices[0])
    host_bytes = host_memory.free_bytes() or host_memory.total_bytes()
    if args.host_memory_gib is not None:
        host_bytes = int(args.host_memory_gib * GIB_BYTES)
    return assume_facts(
        memory_bytes=int(args.device_memory_gib * GIB_BYTES),
        link_bytes_per_s=None if args.link_gib_s is None else args.link_gib_s * GIB_BYTES,
        label=args.device_label or f"a GPU of {args.device_memory_gib:g} GiB",
        host_free_bytes=host_bytes,
    )


def shape_of(stage: ResolvedStage, args: argparse.Namespace) -> RequestShape:
    """The flags, else the stage's default sampling parameters, else the planner's own."""
    from omnistage.memory.planning.shape import RequestShape

    defaults = stage.default_sampling_params
    given = {
        "height": args.height or defaults.get("height"),
        "width": args.width or defaults.get("width"),
        "frames": args.frames or defaults.get("num_frames"),
        "steps": args.steps or defaults.get("num_inference_steps"),
        "requests": args.requests,
    }
    if args.size is not None:
        given["width"], given["height"] = _size(args)
    return RequestShape(**{name: value for name, value in given.items() if value is not None})


def _size(args: argparse.Namespace) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", args.size)
    if found is None or args.height or args.width:
        raise ConfigurationError(
            f"--size must be like 1024x768, width first, and without --height and --width; got "
            f"{args.size!r}"
        )
    return int(found[1]), int(found[2])


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value
