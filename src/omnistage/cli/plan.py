"""Show the resolved configuration and what would be loaded, without loading any weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.cli.model_flags import add_model_flags, overrides, resolve
from omnistage.cli.parsing import CommandParser
from omnistage.cli.plan_flags import add_plan_flags, facts_for, resolve_as_if, shape_of
from omnistage.config.deploy import load_deploy
from omnistage.config.describe import describe, describe_origins
from omnistage.config.pipeline import ExecutionType
from omnistage.config.plain import to_plain
from omnistage.config.resolved import OmniConfig, ResolvedStage

if TYPE_CHECKING:
    from omnistage.memory.pipeline_plan import PipelinePlan
    from omnistage.memory.placement import Placement


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--config-only", action="store_true", help="leave out the load plan, which needs torch"
    )
    parser.add_argument("--json", action="store_true", help="print the configuration as JSON")
    add_plan_flags(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = resolve(args) if args.device_memory_gib is None else resolve_as_if(args)
    if args.json:
        print(json.dumps(_as_json(config, args), indent=2))
        return 0
    print(describe(config))
    origins = _origins(args, config)
    if origins:
        print(f"\nnot left at their default:\n{origins}")
    if not args.config_only:
        for stage in config.stages:
            print(f"\nload plan of stage {stage.stage_id}, {stage.name}:\n{load_plan(stage, args)}")
    return 0


def load_plan(stage: ResolvedStage, args: argparse.Namespace) -> str:
    """What one replica of the stage would load, from configurations and file headers."""
    if stage.stage.execution_type != ExecutionType.DIFFUSION:
        return _module_plan(stage)
    from omnistage.memory.planning.describe import describe_placement

    plan, placement = _placed(stage, args)
    return f"{plan.describe()}\n\nplacement: {describe_placement(placement)}"


def _placed(stage: ResolvedStage, args: argparse.Namespace) -> tuple[PipelinePlan, Placement]:
    from omnistage.memory.pipeline_plan import plan_pipeline
    from omnistage.memory.planning.on_device import place_on_device
    from omnistage.memory.planning.place import plan_placement
    from omnistage.memory.planning.quantizing import quantization_of, transforms_of
    from omnistage.platforms.registry import platform_of

    facts = facts_for(stage, args)
    plan = plan_pipeline(
        Path(stage.model_path),
        dtype=stage.dtype,
        device=facts.device,
        quantization=quantization_of(stage, facts),
    )
    transforms = transforms_of(plan, stage, facts)
    shape = shape_of(stage, args)
    if facts.is_assumed:
        return plan, plan_placement(plan, stage, facts, shape, transforms=transforms)
    platform = platform_of(facts.device)
    return plan, place_on_device(plan, stage, platform, facts, shape, transforms)


def _as_json(config: OmniConfig, args: argparse.Namespace) -> Mapping[str, Any]:
    """The configuration, and `placements` by stage id for stages that have one."""
    data: dict[str, Any] = dict(to_plain(config))
    if args.config_only:
        return data
    from omnistage.memory.planning.describe import placement_data

    data["placements"] = {
        str(stage.stage_id): placement_data(_placed(stage, args)[1])
        for stage in config.stages
        if stage.stage.execution_type == ExecutionType.DIFFUSION
    }
    return data


def _module_plan(stage: ResolvedStage) -> str:
    """Beside the builder that a stage's options name, `build…`, there is a `plan…`."""
    from omnistage.ar.kv_estimate import kv_bytes_per_token
    from omnistage.memory.plan import gib
    from omnistage.stages.imports import load_object

    builder = stage.options.get("token_model") or stage.options.get("codec_model")
    if builder is None or ":build" not in builder:
        return f"stages of kind {stage.stage.execution_type.value} plan their loading at start"
    plan = load_object(builder.replace(":build", ":plan"))(stage, stage.devices[0])
    lines = [plan.describe()]
    if stage.stage.execution_type == ExecutionType.LLM_AR:
        token_bytes = kv_bytes_per_token(plan.skeleton.config, plan.dtype)
        tokens = stage.max_model_len or 1024
        lines.append(
            f"  keys and values: {token_bytes} bytes a token as {plan.dtype}, "
            f"{gib(token_bytes * tokens)} for {tokens} tokens"
        )
    return "\n".join(lines)


def _origins(args: argparse.Namespace, config: OmniConfig) -> str:
    from omnistage.models.registry import find_pipeline

    name = args.deploy_config or find_pipeline(args.model).deploy
    return describe_origins(config.pipeline, load_deploy(name) if name else None, overrides(args))
