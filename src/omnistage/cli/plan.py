"""Show the resolved configuration and what would be loaded, without loading any weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
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
from omnistage.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from omnistage.memory.pipeline_plan import PipelinePlan
    from omnistage.memory.placement import Placement
    from omnistage.memory.planning.facts import DeviceFacts
    from omnistage.memory.planning.shape import RequestShape


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
            print(f"\nload plan of stage {stage.stage_id}, {stage.name}:")
            _print_plan(stage, args)
    return 0


def _print_plan(stage: ResolvedStage, args: argparse.Namespace) -> None:
    """What one replica of the stage would load, from configurations and file headers, and where it
    would be. Where weights cannot move, a start refuses none: they are mapped files there."""
    if stage.stage.execution_type != ExecutionType.DIFFUSION:
        print(_module_plan(stage))
        return
    from omnistage.memory.planning.describe import describe_placement

    facts, shape = facts_for(stage, args), shape_of(stage, args)
    plan = _pipeline_plan(stage, facts)
    print(plan.describe(), flush=True)
    try:
        words = describe_placement(_placement(stage, shape, facts, plan))
    except ConfigurationError as error:
        if facts.offload_unavailable_reason is None:
            raise
        words = f"may not fit, and is tried all the same: {error.message}"
    print(f"\nplacement: {words}")


def _pipeline_plan(stage: ResolvedStage, facts: DeviceFacts) -> PipelinePlan:
    from omnistage.memory.budget import MemoryBudget
    from omnistage.memory.pipeline_plan import plan_pipeline
    from omnistage.memory.planning.quantizing import quantization_of

    fixed = facts.offload_unavailable_reason is not None
    budget = MemoryBudget.of(stage.memory_budget_gib, facts.device) if fixed else None
    return plan_pipeline(
        Path(stage.model_path),
        dtype=stage.dtype,
        device=facts.device,
        budget=budget,
        quantization=quantization_of(stage, facts),
    )


def _placement(
    stage: ResolvedStage, shape: RequestShape, facts: DeviceFacts, plan: PipelinePlan
) -> Placement:
    """Where weights cannot move, a stage's budget is one of weights, which were compared."""
    from omnistage.memory.planning.on_device import place_on_device
    from omnistage.memory.planning.place import plan_placement
    from omnistage.memory.planning.quantizing import transforms_of
    from omnistage.platforms.registry import platform_of

    transforms = transforms_of(plan, stage, facts)
    if facts.offload_unavailable_reason is not None:
        stage = replace(stage, memory_budget_gib=None)
    if facts.is_assumed:
        return plan_placement(plan, stage, facts, shape, transforms=transforms)
    return place_on_device(plan, stage, platform_of(facts.device), facts, shape, transforms)


def _as_json(config: OmniConfig, args: argparse.Namespace) -> Mapping[str, Any]:
    """The configuration, and `placements` by stage id for stages that have one."""
    data: dict[str, Any] = dict(to_plain(config))
    if args.config_only:
        return data
    from omnistage.memory.planning.describe import placement_data

    data["placements"] = {}
    for stage in config.stages:
        if stage.stage.execution_type == ExecutionType.DIFFUSION:
            facts, shape = facts_for(stage, args), shape_of(stage, args)
            made = _placement(stage, shape, facts, _pipeline_plan(stage, facts))
            data["placements"][str(stage.stage_id)] = placement_data(made)
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
