"""Show the resolved configuration and what would be loaded, without loading any weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from omnistage.cli.model_flags import add_model_flags, overrides, resolve
from omnistage.cli.parsing import CommandParser
from omnistage.config.deploy import load_deploy
from omnistage.config.describe import describe, describe_origins
from omnistage.config.pipeline import ExecutionType
from omnistage.config.plain import to_plain
from omnistage.config.resolved import OmniConfig, ResolvedStage


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--config-only", action="store_true", help="leave out the load plan, which needs torch"
    )
    parser.add_argument("--json", action="store_true", help="print the configuration as JSON")
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = resolve(args)
    if args.json:
        print(json.dumps(to_plain(config), indent=2))
        return 0
    print(describe(config))
    origins = _origins(args, config)
    if origins:
        print(f"\nnot left at their default:\n{origins}")
    if not args.config_only:
        for stage in config.stages:
            print(f"\nload plan of stage {stage.stage_id}, {stage.name}:\n{load_plan(stage)}")
    return 0


def load_plan(stage: ResolvedStage) -> str:
    """What one replica of the stage would load, from configurations and file headers."""
    if stage.stage.execution_type != ExecutionType.DIFFUSION:
        return _module_plan(stage)
    from omnistage.memory.budget import MemoryBudget
    from omnistage.memory.pipeline_loader import plan_pipeline

    device = stage.devices[0]
    plan = plan_pipeline(
        Path(stage.model_path),
        dtype=stage.dtype,
        device=device,
        budget=MemoryBudget.of(stage.memory_budget_gib, device),
    )
    return plan.describe()


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
