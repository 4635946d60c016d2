"""One request to Qwen-Image at full size on a GPU: milliseconds a step, ours beside diffusers'.

The 20.4 B shape with random bfloat16 weights, guided (true CFG), prompts of 256 and 10 tokens.
Sides take turns: diffusers' own pipeline eager and with compiled blocks, our step mode, and our
step mode with `enforce_eager`. All four share the weights. `--tiny` runs a toy on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import finish

CEILING_TFLOPS = 786.0
"""bfloat16 matrix products on an H200, as measured for the design."""
TARGETS = {
    1024: {"diffusers_eager": 1.30, "diffusers_compiled": 1.10},
    512: {"diffusers_eager": 2.5},
}
PROMPT_TOKENS, NEGATIVE_TOKENS = 256, 10
WARM_STEPS = 2
COMPILING_STEPS = 14
"""Of the first request at each size: kernels are compiled, graphs captured at the twelfth use."""

Run = Callable[[int, int, Callable[[int], None]], None]
"""(size, steps, called back with the number of steps done)."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from _qwen_image import Partial, build, twin

    partial = Partial(args.output)
    started = time.monotonic()
    pipeline = build(args.device, tiny=args.tiny)
    count = sum(one.numel() for one in pipeline.transformer.parameters())
    partial.add(parameters_b=round(count / 1e9, 3), build_s=round(time.monotonic() - started, 1))
    compiled = twin(pipeline)
    if not args.no_compile:
        torch._dynamo.config.recompile_limit = 64
        compiled.transformer.compile_repeated_blocks()
    sides: dict[str, Run] = {
        "diffusers_eager": peer(pipeline),
        "diffusers_compiled": peer(compiled),
        "ours": ours(twin(pipeline), args, enforce_eager=args.no_compile),
        "ours_eager": ours(twin(pipeline), args, enforce_eager=True),
    }
    figures = {}
    for size in args.sizes:
        figures[size] = measure(size, sides, args, partial, started)
    return report(figures, args, partial.values)


def parse(argv: list[str] | None) -> Any:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--device", default="cuda:0", help="(%(default)s)")
    flags.add_argument("--tiny", action="store_true", help="a toy on the CPU")
    flags.add_argument("--sizes", type=int, nargs="+", default=None, help="(1024 512)")
    flags.add_argument("--steps", type=int, default=12, help="timed ones (%(default)s)")
    flags.add_argument("--rounds", type=int, default=3, help="turns of each side (%(default)s)")
    flags.add_argument(
        "--graph-max-tokens",
        type=int,
        default=16384,
        help="ours: largest forward that is replayed from a graph (%(default)s, so that both are)",
    )
    flags.add_argument("--budget-s", type=float, default=220, help="no new round after this")
    flags.add_argument("--output", type=Path, help="file for results as far as they are")
    flags.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    args = flags.parse_args(argv)
    args.no_compile = args.tiny
    if args.tiny:
        args.device = "cpu"
    args.sizes = args.sizes or ([64, 32] if args.tiny else [1024, 512])
    return args


def peer(pipeline: Any) -> Run:
    """The unmodified call of diffusers."""
    import torch
    from _qwen_image import call_arguments

    def run(size: int, steps: int, stepped: Callable[[int], None]) -> None:
        def callback(pipe: Any, index: int, timestep: Any, tensors: Any) -> dict[str, Any]:
            stepped(index + 1)
            return {}

        with torch.no_grad():
            pipeline(
                **call_arguments(size, steps, PROMPT_TOKENS, NEGATIVE_TOKENS, 0),
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
                callback_on_step_end=callback,
            )

    return run


def ours(pipeline: Any, args: Any, *, enforce_eager: bool) -> Run:
    """Our scheduler and step runner, as a replica drives them."""
    from _qwen_image import Ours, call_arguments, stage_of
    from _serving_loop import Loop, request

    stage = stage_of(
        args.device,
        step_execution=True,
        max_num_seqs=1,
        enforce_eager=enforce_eager,
        options={"graph_max_tokens": args.graph_max_tokens},
    )
    engine = Ours(pipeline, stage)

    def run(size: int, steps: int, stepped: Callable[[int], None]) -> None:
        call = call_arguments(size, steps, PROMPT_TOKENS, NEGATIVE_TOKENS, 0)
        with Loop(engine) as loop:
            loop.on_command = lambda command: (
                stepped(loop.steps_done) if command.name == "step" else None
            )
            loop.submit(request(call, "only", output_type="latent"))
            loop.run_until_idle()

    return run


def measure(
    size: int, sides: dict[str, Run], args: Any, partial: Any, started: float
) -> dict[str, float]:
    """Medians by side."""
    from _qwen_image import step_ms

    taken: dict[str, list[float]] = {name: [] for name in sides}
    for name, run in sides.items():
        began = time.monotonic()
        run(size, COMPILING_STEPS, lambda done: None)
        partial.add(**{f"{size}/{name}/first_s": round(time.monotonic() - began, 1)})
    for round_ in range(args.rounds):
        if round_ and time.monotonic() - started > args.budget_s:
            print(f"{size}: {round_} rounds only, time is up", flush=True)
            break
        names = list(sides) if round_ % 2 == 0 else list(reversed(sides))
        for name in names:
            once = functools.partial(sides[name], size, WARM_STEPS + args.steps)
            taken[name].append(round(step_ms(once, args.device, WARM_STEPS, args.steps), 3))
        partial.add(**{f"{size}/step_ms": taken})
    return {name: statistics.median(times) for name, times in taken.items()}


def step_tflop(size: int, width: int, layers: int) -> float:
    """Both branches: 60 (2 L 12 d^2 + 4 L^2 d) each, by the design's formula."""
    total = 0.0
    for text in (PROMPT_TOKENS, NEGATIVE_TOKENS):
        tokens = (size // 16) ** 2 + text
        total += layers * (2 * tokens * 12 * width**2 + 4 * tokens**2 * width)
    return total / 1e12


def report(figures: dict[int, dict[str, float]], args: Any, partial: dict[str, Any]) -> int:
    from _qwen_image import FULL, TINY

    shape = TINY if args.tiny else FULL
    width = shape["attention_head_dim"] * shape["num_attention_heads"]
    variants, met = {}, set(TARGETS) <= set(figures)
    for size, ms in figures.items():
        ratios = {name: round(ms[name] / ms["ours"], 3) for name in ms if name != "ours"}
        goals = TARGETS.get(size, {})
        met = met and all(ratios[name] >= goal for name, goal in goals.items())
        tflops = step_tflop(size, width, shape["num_layers"]) / ms["ours"] * 1e3
        variants[str(size)] = {
            "step_ms": {name: round(value, 2) for name, value in ms.items()},
            "peer_over_ours": ratios,
            "targets": goals,
            "tflops": round(tflops, 1),
            "share_of_ceiling": round(tflops / CEILING_TFLOPS, 3),
        }
    first = next(iter(figures))
    return finish(
        "qwen_image",
        value=round(figures[first]["ours"], 3),
        unit="ms/step",
        peer="diffusers' own QwenImagePipeline, eager, same weights, same process",
        peer_value=round(figures[first]["diffusers_eager"], 3),
        target=round(figures[first]["diffusers_eager"] / TARGETS[1024]["diffusers_eager"], 3),
        met=met,
        workload=(
            f"one request, {'a toy' if args.tiny else 'the 20.4 B shape'} with random weights, "
            f"true CFG, prompts of {PROMPT_TOKENS} and {NEGATIVE_TOKENS} tokens, sizes "
            f"{', '.join(map(str, figures))}; median of {args.rounds} turns of {args.steps} steps; "
            f"ceiling {CEILING_TFLOPS:g} TFLOP/s; graph_max_tokens {args.graph_max_tokens}"
        ),
        save=args.save,
        variants=variants,
        rounds=partial,
    )


if __name__ == "__main__":
    sys.exit(main())
