"""Many requests to Qwen-Image at full size on a GPU: rates and waiting times of four ways to serve.

Step mode, request mode in batches and one at a time, and diffusers' own pipeline one at a time:
first with a fixed number of clients that each wait for their picture, then with Poisson arrivals of
mixed sizes. Then cancels: how soon a place is free again, and whether memory stays flat.
`--tiny` runs a toy on the CPU.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import finish

MANY = 8
PROMPT_TOKENS, NEGATIVE_TOKENS = (256, 120, 40), 10
SMALL_SHARE = 0.7
LOAD = 0.8
"""Poisson arrivals come at this share of step mode's rate with eight clients."""
CANCEL_STEPS = 8


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from _qwen_image import Ours, Partial, build, stage_of, twin

    if not args.tiny:
        torch._dynamo.config.recompile_limit = 64
    partial = Partial(args.output)
    pipeline = build(args.device, tiny=args.tiny)
    step, request, alone = (
        stage_of(args.device, **settings)
        for settings in (
            {"step_execution": True, "max_num_seqs": MANY},
            {"max_num_seqs": MANY},
            {"max_num_seqs": 1},
        )
    )
    sides: dict[str, Any] = {
        "step": Ours(twin(pipeline), step),
        "request": (requests := Ours(twin(pipeline), request)),
        "request_alone": requests.with_scheduler_of(alone),
        "diffusers": Diffusers(pipeline),
    }
    warm_up(sides, args, partial)
    clock = Clock(time.monotonic(), args.budget_s)
    rates = closed_loops(sides, args.clients[:1], args, partial, clock)
    arrivals = open_loops(sides, rates, args, partial, clock)
    rates |= closed_loops(sides, args.clients[1:], args, partial, clock)
    cancels = {
        **freed_places(sides["step"], args),
        **memory_after_cancels(sides["step"], args),
    }
    partial.add(cancels=cancels)
    return report(rates, arrivals, cancels, args)


def parse(argv: list[str] | None) -> Any:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--device", default="cuda:0", help="(%(default)s)")
    flags.add_argument("--tiny", action="store_true", help="a toy on the CPU")
    flags.add_argument("--steps", type=int, default=4, help="of a request (%(default)s)")
    flags.add_argument("--requests", type=int, default=16, help="a measurement (%(default)s)")
    flags.add_argument(
        "--clients", type=int, nargs="+", default=[8, 1, 4, 16], help="(%(default)s)"
    )
    flags.add_argument("--cancels", type=int, default=1000, help="(%(default)s)")
    flags.add_argument(
        "--budget-s",
        type=float,
        default=110,
        help="no new measurement when so long has been measured",
    )
    flags.add_argument("--output", type=Path, help="file for results as far as they are")
    flags.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    args = flags.parse_args(argv)
    if args.tiny:
        args.device = "cpu"
    args.sizes = (32, 64) if args.tiny else (512, 1024)
    args.cancel_size = 32 if args.tiny else 256
    return args


class Clock:
    """When there is no time for another measurement."""

    def __init__(self, started: float, budget_s: float) -> None:
        self._started, self._budget_s = started, budget_s

    def is_up(self, what: str) -> bool:
        up = time.monotonic() - self._started > self._budget_s
        if up:
            print(f"{what}: skipped, time is up", flush=True)
        return up


class Diffusers:
    """The unmodified pipeline, one request at a time, as a side of the comparison."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def make(self, call: dict[str, Any]) -> None:
        import torch

        with torch.no_grad():
            self.pipeline(**call, generator=torch.Generator().manual_seed(0))


# loads ------------------------------------------------------------------------------------------


def mixed_calls(count: int, args: Any) -> list[dict[str, Any]]:
    from _qwen_image import call_arguments

    chance = random.Random(0)
    small, large = args.sizes
    return [
        call_arguments(
            small if chance.random() < SMALL_SHARE else large,
            args.steps,
            chance.choice(PROMPT_TOKENS),
            NEGATIVE_TOKENS,
            number,
        )
        for number in range(count)
    ]


def warm_up(sides: dict[str, Any], args: Any, partial: Any) -> None:
    """Each side at each size, alone and in a batch, so that nothing is compiled later."""
    for name, side in sides.items():
        began = time.monotonic()
        for size in args.sizes:
            calls = [{**one, "height": size, "width": size} for one in mixed_calls(3, args)]
            serve(side, calls[:1], [0.0])
            if not isinstance(side, Diffusers):
                serve(side, calls, [0.0] * len(calls))
        partial.add(**{f"{name}/warm_up_s": round(time.monotonic() - began, 1)})


def closed_loops(
    sides: dict[str, Any], numbers: Sequence[int], args: Any, partial: Any, clock: Clock
) -> dict[str, Any]:
    """With each of `numbers` clients, that ask for the next picture when they have one."""
    found: dict[str, Any] = {}
    calls = mixed_calls(args.requests, args)
    for clients in numbers:
        for name, side in sides.items():
            one_at_a_time = name in ("diffusers", "request_alone")
            if one_at_a_time and clients != args.clients[0]:
                continue  # more clients change their waiting, not their rate
            label = f"{name}/{clients} clients"
            if clock.is_up(label):
                continue
            found[label] = closed_loop(side, calls, clients)
            partial.add(**{label: found[label]})
    return found


def open_loops(
    sides: dict[str, Any], rates: dict[str, Any], args: Any, partial: Any, clock: Clock
) -> dict[str, Any]:
    first = rates[f"step/{args.clients[0]} clients"]["requests_per_s"]
    chance, when = random.Random(1), [0.0]
    while len(when) < args.requests:
        when.append(when[-1] + chance.expovariate(LOAD * first))
    found: dict[str, Any] = {"arrivals_per_s": round(LOAD * first, 4)}
    partial.add(arrivals_per_s=found["arrivals_per_s"])
    for name, side in sides.items():
        if clock.is_up(f"{name}/poisson"):
            continue
        found[name] = summary(*serve(side, mixed_calls(args.requests, args), when))
        partial.add(**{f"{name}/poisson": found[name]})
    return found


def serve(side: Any, calls: Sequence[dict[str, Any]], when: Sequence[float]) -> Any:
    """Latencies in seconds and the time for all, of `calls` that arrive at `when`."""
    if isinstance(side, Diffusers):
        return one_after_the_other(side, calls, when)
    from _serving_loop import STALL_S, Loop, request

    pending = [
        (at, request(call, f"request-{number}"))
        for number, (call, at) in enumerate(zip(calls, when, strict=True))
    ]
    started = time.perf_counter()
    with Loop(side) as loop:
        while pending or loop.num_open:
            now = time.perf_counter() - started
            while pending and pending[0][0] <= now:
                at, one = pending.pop(0)
                loop.submit(one, started + at)
            if not loop.turn():
                loop.wait(max(0.0, pending[0][0] - now) if pending else STALL_S)
        return list(loop.latencies_s.values()), time.perf_counter() - started


def one_after_the_other(
    side: Diffusers, calls: Sequence[dict[str, Any]], when: Sequence[float]
) -> tuple[list[float], float]:
    latencies_s, started = [], time.perf_counter()
    for call, at in zip(calls, when, strict=True):
        time.sleep(max(0.0, started + at - time.perf_counter()))
        side.make(call)
        latencies_s.append(time.perf_counter() - started - at)
    return latencies_s, time.perf_counter() - started


def closed_loop(side: Any, calls: Sequence[dict[str, Any]], clients: int) -> dict[str, float]:
    if isinstance(side, Diffusers):
        return summary(*one_after_the_other(side, calls, [0.0] * len(calls)))
    from _serving_loop import STALL_S, Loop, request

    pending = [request(call, f"request-{number}") for number, call in enumerate(calls)]
    started = time.perf_counter()
    with Loop(side) as loop:
        while pending or loop.num_open:
            while pending and loop.num_open < clients:
                loop.submit(pending.pop(0))
            if not loop.turn():
                loop.wait(STALL_S)
        return summary(list(loop.latencies_s.values()), time.perf_counter() - started)


def summary(latencies_s: Sequence[float], total_s: float) -> dict[str, float]:
    import numpy as np

    p50, p99 = (round(float(np.percentile(latencies_s, one)), 3) for one in (50, 99))
    return {"requests_per_s": round(len(latencies_s) / total_s, 4), "p50_s": p50, "p99_s": p99}


# cancels ----------------------------------------------------------------------------------------


def cancel_requests(count: int, args: Any) -> list[Any]:
    from _qwen_image import call_arguments
    from _serving_loop import request

    size, tokens = args.cancel_size, PROMPT_TOKENS[-1]
    calls = [
        call_arguments(size, CANCEL_STEPS, tokens, NEGATIVE_TOKENS, number)
        for number in range(count)
    ]
    return [request(call, f"cancel-{number}") for number, call in enumerate(calls)]


def freed_places(side: Any, args: Any, tries: int = 8) -> dict[str, Any]:
    """All places are taken and one request waits. A cancel comes at a random moment of a step: how
    many steps the cancelled one still takes, and how many pass until the other has its place."""
    from _serving_loop import Loop

    chance = random.Random(2)
    taken, waited = [], []
    for _ in range(tries):
        *running, waiting = cancel_requests(MANY + 1, args)
        victim = chance.choice(running).identity.key
        seen: list[tuple[str, frozenset[Any]]] = []
        with Loop(side) as loop:
            loop.on_command = lambda command, seen=seen: seen.append(
                (command.name, frozenset(one.key for one in command.identities))
            )
            for one in (*running, waiting):
                loop.submit(one)
            while loop.steps_done < chance.randint(1, 3):
                loop.turn()
            loop.turn()  # the cancel arrives while this command runs
            loop.abort(victim)
            before = len(seen)
            while waiting.identity.key not in seen[-1][1]:
                loop.turn()
        after = seen[before:]
        taken.append(sum(victim in keys for _, keys in after))
        waited.append(sum(name == "step" for name, _ in after))
    return {
        "steps_of_a_cancelled_request_after_its_command": max(taken),
        "steps_until_its_place_is_taken": max(waited),
    }


def memory_after_cancels(side: Any, args: Any) -> dict[str, Any]:
    """Requests are cancelled after one to three steps; what is allocated meanwhile."""
    from _serving_loop import Loop

    chance, started = random.Random(3), time.monotonic()
    waiting, left = cancel_requests(args.cancels, args), {}
    allocated_bytes, done = [], 0
    with Loop(side) as loop:

        def note(command: Any) -> None:
            for identity in command.identities if command.name == "step" else ():
                left[identity.key] -= 1

        loop.on_command = note
        while done < args.cancels:
            while waiting and loop.num_open < MANY:
                one = waiting.pop()
                left[one.identity.key] = chance.randint(1, 3)
                loop.submit(one)
            loop.turn()
            for key in [key for key, steps in left.items() if steps <= 0]:
                loop.abort(key)
                del left[key]
                done += 1
                if done % max(1, args.cancels // 10) == 0:
                    allocated_bytes.append(allocated(args.device))
    allocated_bytes.append(allocated(args.device))
    assert side.runner.num_states == 0, "a cancelled request is still held"
    return {
        "cancels": done,
        "allocated_bytes": allocated_bytes,
        "grown_bytes": allocated_bytes[-2] - allocated_bytes[0],
        "seconds": round(time.monotonic() - started, 1),
    }


def allocated(device: str) -> int:
    from omnistage.platforms.registry import platform_of

    platform_of(device).synchronize(device)
    return platform_of(device).memory_stats(device).allocated_bytes


def report(
    rates: dict[str, Any], arrivals: dict[str, Any], cancels: dict[str, Any], args: Any
) -> int:
    clients = args.clients[0]
    ours = rates[f"step/{clients} clients"]["requests_per_s"]
    peer = rates.get(f"diffusers/{clients} clients", {}).get("requests_per_s")
    if peer is None:
        sys.exit("time was up before diffusers had its turn: raise --budget-s")
    batches = rates.get(f"request/{clients} clients", {}).get("requests_per_s", 0.0)
    flat = cancels["grown_bytes"] < 64 * 2**20
    at_once = cancels["steps_until_its_place_is_taken"] <= 1
    return finish(
        "qwen_image_serving",
        value=ours,
        unit="requests/s",
        peer="diffusers' own QwenImagePipeline, eager, one at a time, same weights, same process",
        peer_value=peer,
        target=1.0,
        met=ours > peer and ours > batches and flat and at_once,
        workload=(
            f"{'a toy' if args.tiny else 'the 20.4 B shape'} with random weights, true CFG, "
            f"{args.steps} steps, {SMALL_SHARE:.0%} {args.sizes[0]}x{args.sizes[0]}, the others "
            f"{args.sizes[1]}x{args.sizes[1]}, {args.requests} requests a measurement, "
            f"{clients} clients, max_num_seqs {MANY}"
        ),
        save=args.save,
        closed=rates,
        poisson=arrivals,
        cancels=cancels,
    )


if __name__ == "__main__":
    sys.exit(main())
