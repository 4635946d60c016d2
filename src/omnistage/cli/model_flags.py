"""The flags that say which model and how it is deployed, made from the configuration's schema."""

from __future__ import annotations

import argparse
from typing import Any, Literal, get_args, get_origin

from omnistage.cli.parsing import CommandParser, OverrideAction
from omnistage.config.overrides import Overrides
from omnistage.config.resolved import OmniConfig
from omnistage.config.schema import (
    ALIASES,
    DEPLOYMENT_KEYS,
    LIMIT_KEYS,
    STAGE_KEYS,
    Count,
    Fraction,
    Key,
    Milliseconds,
    NonNegative,
    Quantization,
    Seconds,
)

DEFAULT_MODEL = "omnistage/tiny-image"

_METAVARS: dict[Any, str] = {
    Count: "N",
    Count | None: "N",
    NonNegative: "N",
    NonNegative | None: "N",
    Literal[-1] | Count: "N",
    Fraction: "FRACTION",
    Quantization: "METHOD",
    Seconds: "SECONDS",
    Milliseconds: "MILLISECONDS",
    dict: "JSON",
    dict[str, Any]: "JSON",
    dict[str | int, Any]: "JSON",
    str | list[str | int]: "LIST",
}
_EXTRA_SPELLINGS = {"max_inflight_requests": ["max_queue"]}
_EXTRA_NEGATIONS = {"dlo_use_allgather": ["dlo_no_use_allgather"]}


def add_model_flags(parser: CommandParser, *, model_optional: bool = False) -> None:
    """MODEL, the deploy file, and every key of the schema as a flag."""
    parser.takes_overrides = True
    parser.usage = f"{parser.prog} {'[MODEL]' if model_optional else 'MODEL'} [flags]"
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if model_optional else None,
        default=DEFAULT_MODEL if model_optional else None,
        help="a directory of diffusers or transformers, a GGUF file, a hub id, or "
        "omnistage/tiny-image, which comes along" + (" (the default)" if model_optional else ""),
    )
    placement = parser.add_argument_group(
        "deployment",
        "A key of one stage: --stage-0.max-num-seqs 4, or --stage-0 '{\"max_num_seqs\": 4}'. "
        "One stage's value beats the flag for all stages, which beats the deploy file.",
    )
    placement.add_argument(
        "--deploy-config", metavar="PATH", help="deploy file, or the name of a bundled one"
    )
    _add_text(placement, "stage_overrides", "JSON", "settings by stage id: '{\"0\": {…}}'")
    _add_text(placement, "device", "KIND", f"{STAGE_KEYS['device'].meaning} (auto, cpu, cuda)")
    for name, key in (STAGE_KEYS | DEPLOYMENT_KEYS | LIMIT_KEYS).items():
        if key.flag:
            _add_key(placement, name, key)
    for name, what in (("vae_tiling", "in tiles"), ("vae_slicing", "one by one")):
        _add_switch(
            placement,
            name.replace("vae_", "vae_use_"),
            f"options.{name}",
            f"decode pictures {what}: slower, in less memory",
        )
    placement.add_argument("--omni", action="store_true", help="accepted; does nothing")


def resolve(args: argparse.Namespace, *extra: tuple[str, str]) -> OmniConfig:
    """The configuration that the flags ask for. `extra` are further overrides by name.

    Raises also what a stage's runtime refuses before it loads: `plan` says what `serve` would, and
    nobody waits for processes to hear it.
    """
    from omnistage.engine.configure import configure
    from omnistage.stages.imports import load_object

    config = configure(
        args.model, deploy_config=args.deploy_config, overrides=overrides(args, *extra)
    )
    for stage in config.stages:
        load_object(stage.stage.runtime).scheduler(stage)
    return config


def overrides(args: argparse.Namespace, *extra: tuple[str, str]) -> Overrides:
    return Overrides.from_flags([*args.overrides, *extra])


def as_flags(args: argparse.Namespace) -> list[str]:
    """The deployment flags again, for a command that starts another."""
    words = ["--deploy-config", args.deploy_config] if args.deploy_config else []
    for name, text in args.overrides:
        flag = _flag(name)
        key = (STAGE_KEYS | DEPLOYMENT_KEYS).get(name)
        if key is not None and key.type is bool:
            words.append(flag if text == "true" else flag.replace("--", "--no-", 1))
        else:
            words += [flag, text]
    return words


def _add_key(group: argparse._ArgumentGroup, name: str, key: Key) -> None:
    if key.type is bool:
        _add_switch(group, name, name, key.meaning)
    else:
        _add_text(group, name, _metavar(name, key), f"{key.meaning}{_choices(key)}")


def _add_text(group: argparse._ArgumentGroup, name: str, metavar: str, meaning: str) -> None:
    others = [alias for alias, target in ALIASES.items() if target == name]
    for spelling in [name, *_EXTRA_SPELLINGS.get(name, []), *others]:
        group.add_argument(
            _flag(spelling),
            action=OverrideAction,
            override=name,
            metavar=metavar,
            dest=argparse.SUPPRESS,
            help=meaning if spelling == name else argparse.SUPPRESS,
        )


def _add_switch(group: argparse._ArgumentGroup, name: str, override: str, meaning: str) -> None:
    off = [_flag(word) for word in [f"no_{name}", *_EXTRA_NEGATIONS.get(name, [])]]
    group.add_argument(
        _flag(name),
        *off,
        action=OverrideAction,
        override=override,
        negated=off,
        nargs=0,
        dest=argparse.SUPPRESS,
        help=meaning,
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _choices(key: Key) -> str:
    return f" ({', '.join(get_args(key.type))})" if get_origin(key.type) is Literal else ""


def _metavar(name: str, key: Key) -> str:
    if name.endswith("_gib"):
        return "GIB"
    return _METAVARS.get(key.type, "NAME")
