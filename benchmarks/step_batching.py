"""Many requests at once on a CPU: our engine in step mode beside one at a time through diffusers.

Throughput: `--concurrency` requests arrive together. Step mode and request mode of our engine take
turns with unmodified diffusers, which gets the same prompts, seeds and steps; pictures may differ
by rounding only. Mixed sizes: requests of several sizes arrive at random; what they wait for is
measured with our scheduler and with the same one made strictly first come, first served.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _common import elapsed_s, finish, median, model_folder, parser, same_threads_everywhere

from omnistage.diffusion.runtime import DiffusionRuntime
from omnistage.diffusion.step_scheduler import StepScheduler

TARGET_RATIO = 2.5
SIZES = (64, 96, 128, 192)
LOAD = 0.8
"""Requests arrive at this share of the rate at which ours serves them when all are there."""
LEVELS_APART = 2
"""How far pictures of 8 bits may differ: a value between two levels rounds either way."""
COLORS, SHAPES = ("red", "blue", "green", "yellow"), ("circle", "square", "triangle")


class FifoRuntime:
    """Named by the stage of the engine that ours is compared with."""

    executor = staticmethod(DiffusionRuntime.executor)

    @staticmethod
    def scheduler(stage: Any) -> StepScheduler:
        """Nobody is admitted before one that came earlier, and one shape runs at a time."""
        ours = DiffusionRuntime.scheduler(stage)
        return StepScheduler(
            ours.queue, max_num_seqs=ours.max_num_seqs, max_shapes=1, max_overtakes=0
        )


@dataclass(frozen=True, kw_only=True)
class Call:
    """One picture to be made, after `delay_s`."""

    prompt: str
    seed: int
    side: int
    steps: int
    true_cfg_scale: float
    delay_s: float = 0.0


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__, rounds=5)
    flags.set_defaults(threads=2)
    flags.add_argument("--side", type=int, default=128, help="pixels (%(default)s)")
    flags.add_argument("--steps", type=int, default=10, help="(%(default)s)")
    flags.add_argument("--true-cfg-scale", type=float, default=2.0, help="(%(default)s)")
    flags.add_argument("--concurrency", type=int, default=8, help="(%(default)s)")
    flags.add_argument("--mixed", type=int, default=32, help="requests of mixed sizes; 0: none")
    flags.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="(%(default)s)")
    flags.add_argument("--process", default="separate", help="of our stages, or 'inline'")
    args = flags.parse_args(argv)
    same_threads_everywhere(args.threads)
    return asyncio.run(measure(args))


async def measure(args: Any) -> int:
    variants = await throughput(args)
    if args.mixed:
        variants["mixed_sizes"] = await mixed_sizes(args)
    step = variants["step"]
    return finish(
        "step_batching",
        value=step["requests_per_s"],
        unit="requests/s",
        peer="one at a time through diffusers' own pipeline in this process",
        peer_value=variants["diffusers"]["requests_per_s"],
        target=TARGET_RATIO,
        met=step["ratio"] >= TARGET_RATIO,
        workload=(
            f"{args.concurrency} concurrent requests to {args.model.rpartition('/')[2]}, "
            f"{args.side}x{args.side}, {args.steps} steps, true_cfg_scale {args.true_cfg_scale:g}, "
            f"float32, CPU, {args.threads} thread(s) on each side, engine in step mode with "
            f"max_num_seqs {args.concurrency}; median of {args.rounds}, taking turns"
        ),
        save=args.save,
        variants=variants,
    )


# throughput -----------------------------------------------------------------------------------


async def throughput(args: Any) -> dict[str, Any]:
    """Requests per second of each side, and the ratio to diffusers."""
    calls = [call_of(index, args.side, args) for index in range(args.concurrency)]
    taken: dict[str, list[float]] = {"step": [], "request": [], "diffusers": []}
    peer = bare_pipeline(model_folder(args.model))
    async with engine(args, step_execution=True) as step, engine(args) as request:
        made = {
            "step": await run_all(step, calls),
            "request": await run_all(request, calls),
            "diffusers": [make(peer, call) for call in calls],
        }
        for side in ("step", "request"):
            check_pictures(made[side], made["diffusers"], side)
        for round_ in range(args.rounds):
            sides = list(taken) if round_ % 2 == 0 else list(reversed(taken))
            for side in sides:
                started = time.perf_counter()
                if side == "diffusers":
                    elapsed_s(lambda: [make(peer, call) for call in calls])
                else:
                    await run_all(step if side == "step" else request, calls)
                taken[side].append(time.perf_counter() - started)
            latest = ", ".join(f"{side} {times[-1]:.2f} s" for side, times in taken.items())
            print(f"round {round_ + 1}: {latest}", flush=True)
    peer_s = statistics.median(taken["diffusers"])
    return {
        side: {
            "requests_per_s": round(len(calls) / statistics.median(times), 3),
            "ratio": round(peer_s / statistics.median(times), 3),
            "seconds": [round(one, 3) for one in times],
        }
        for side, times in taken.items()
    }


def call_of(index: int, side: int, args: Any, delay_s: float = 0.0) -> Call:
    color, shape = COLORS[index % len(COLORS)], SHAPES[index // len(COLORS) % len(SHAPES)]
    below = " above a blue square" if index % 2 else ""
    return Call(
        prompt=f"a small {color} {shape}{below} on a white background",
        seed=index,
        side=side,
        steps=args.steps,
        true_cfg_scale=args.true_cfg_scale,
        delay_s=delay_s,
    )


def engine(args: Any, **settings: Any) -> Any:
    from omnistage import AsyncOmni

    return AsyncOmni(args.model, **{**shared_settings(args), "process": args.process, **settings})


def shared_settings(args: Any) -> dict[str, Any]:
    return {
        "max_num_seqs": args.concurrency,
        "device": "cpu",
        "dtype": "float32",
        "log_level": "error",
    }


async def run_all(omni: Any, calls: Sequence[Call]) -> list[Any]:
    """The pictures, as arrays, in the order of `calls`."""
    return await asyncio.gather(*(run_one(omni, call) for call in calls))


async def run_one(omni: Any, call: Call) -> Any:
    import numpy as np

    from omnistage import OmniDiffusionSamplingParams

    params = OmniDiffusionSamplingParams(
        height=call.side,
        width=call.side,
        num_inference_steps=call.steps,
        true_cfg_scale=call.true_cfg_scale,
        seed=call.seed,
    )
    await asyncio.sleep(call.delay_s)
    prompt = {"prompt": call.prompt, "negative_prompt": ""}
    async for output in omni.generate(prompt, params):
        if output.finished:
            return np.asarray(output.images[0])
    raise AssertionError("the stream ended without its last event")


def bare_pipeline(folder: Path) -> Any:
    import torch
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make(pipeline: Any, call: Call) -> Any:
    import numpy as np
    import torch

    with torch.no_grad():
        result = pipeline(
            prompt=call.prompt,
            negative_prompt="",
            true_cfg_scale=call.true_cfg_scale,
            height=call.side,
            width=call.side,
            num_inference_steps=call.steps,
            generator=torch.Generator("cpu").manual_seed(call.seed),
        )
    return np.asarray(result.images[0])


def check_pictures(ours: Sequence[Any], theirs: Sequence[Any], side: str) -> None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        apart = abs(one.astype(int) - other.astype(int)).max()
        if one.shape != other.shape or apart > LEVELS_APART or other.std() < 1:
            sys.exit(f"{side}: picture {index} differs from diffusers' by {apart} levels of 255")


# mixed sizes ----------------------------------------------------------------------------------


async def mixed_sizes(args: Any) -> dict[str, Any]:
    """Seconds from arrival to picture, of ours and of the strict order, on the same arrivals."""
    chance = random.Random(0)
    sides = [chance.choice(list(args.sizes)) for _ in range(args.mixed)]
    taken: dict[str, list[float]] = {"ours": [], "fifo": []}
    p99_ratios: list[float] = []
    async with mixed_engine(args, None) as ours, mixed_engine(args, FifoRuntime) as fifo:
        at_once = [call_of(index, side, args) for index, side in enumerate(sides)]
        await run_all(ours, at_once[:: max(1, args.mixed // 8)])  # warms up
        started = time.perf_counter()
        await run_all(ours, at_once)
        rate = LOAD * args.mixed / (time.perf_counter() - started)
        calls, when = [], 0.0
        for index, side in enumerate(sides):
            calls.append(call_of(index, side, args, when))
            when += chance.expovariate(rate)
        engines = {"ours": ours, "fifo": fifo}
        for round_ in range(max(1, args.rounds // 2)):
            order = list(engines) if round_ % 2 == 0 else list(reversed(engines))
            latest = {}
            for name in order:
                latest[name] = await latencies_s(engines[name], calls)
                taken[name] += latest[name]
            p99_ratios.append(percentile(latest["fifo"], 99) / percentile(latest["ours"], 99))
            print(f"mixed {round_ + 1}: fifo p99 / ours {p99_ratios[-1]:.2f}", flush=True)
    return {
        "sizes": list(args.sizes),
        "requests": args.mixed,
        "arrivals_per_s": round(rate, 3),
        **{
            name: {"p50_s": median(times), "p99_s": round(percentile(times, 99), 5)}
            for name, times in taken.items()
        },
        "p99_fifo_over_ours": round(statistics.median(p99_ratios), 3),
    }


def mixed_engine(args: Any, runtime: type | None) -> Any:
    """In this process, so that a stage can name a runtime of this file."""
    from omnistage import AsyncOmni
    from omnistage.engine.configure import configure

    config = configure(args.model, process="inline", step_execution=True, **shared_settings(args))
    if runtime is None:
        return AsyncOmni(config=config)
    (stage,) = config.stages
    named = replace(stage.stage, runtime=f"{runtime.__module__}:{runtime.__name__}")
    return AsyncOmni(config=replace(config, stages=(replace(stage, stage=named),)))


async def latencies_s(omni: Any, calls: Sequence[Call]) -> list[float]:
    started = time.perf_counter()

    async def latency_s(call: Call) -> float:
        await run_one(omni, call)
        return time.perf_counter() - started - call.delay_s

    return await asyncio.gather(*(latency_s(call) for call in calls))


def percentile(values: Sequence[float], percent: int) -> float:
    import numpy as np

    return float(np.percentile(values, percent))


if __name__ == "__main__":
    sys.exit(main())
