"""Decode speed on a GPU: milliseconds a token, ours beside bare transformers in a captured graph.

The Qwen3-8B shape with random bfloat16 weights, batch 1 and 64 at 1,024 tokens of context. Ours is
the whole token runtime but its messages: scheduler, executor, sampling, tokens on the host. The
peer is the unmodified module with a static cache, its step captured, tokens left on the device.
Both use the same weights, one after the other. `--tiny` runs a toy on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _common import finish

TARGET_MS = {1: 4.8, 64: 7.6}
BANDWIDTH = 4.6e12
"""Bytes a second that reading weights reaches on an H200, as measured for the design."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from _ar_models import qwen3

    shape, device = ("tiny", "cpu") if args.tiny else ("qwen3-8b", "cuda:0")
    module = qwen3(shape, device)
    head = module.get_input_embeddings().weight
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    weights -= head.numel() * head.element_size()
    kv_token = module.config.num_hidden_layers * module.config.num_key_value_heads
    kv_token *= module.config.head_dim * 2 * head.element_size()
    figures: dict[str, Any] = {}

    def keep(**more: Any) -> None:
        figures.update(more)
        print(json.dumps(more), flush=True)
        if args.output:
            Path(args.output).write_text(json.dumps(figures, indent=1))

    with torch.inference_mode():
        for batch in args.batches:
            peer_ms = measure_peer(module, device, batch, args) if not args.tiny else 1.0
            floor_ms = (weights + batch * args.context * kv_token) / BANDWIDTH * 1e3
            keep(**{f"b{batch}_peer_ms": peer_ms, f"b{batch}_floor_ms": round(floor_ms, 3)})
    if not args.tiny:
        torch.cuda.empty_cache()
    loop = make_loop(args, device)
    keep(load_s=loop.load_s, description={k: str(v) for k, v in loop.description.items()})
    for batch in args.batches:
        for name, params in (("greedy", {"temperature": 0.0}), ("sampled", SAMPLED)):
            keep(**measure_ours(loop, batch, args, name, params))
    first, last = args.batches[0], args.batches[-1]
    value = figures[f"b{last}_greedy_ms"]
    met = all(figures[f"b{b}_greedy_ms"] <= TARGET_MS.get(b, 1e9) for b in args.batches)
    return finish(
        "ar_decode",
        value=value,
        unit=f"ms/token, batch {last}",
        peer="transformers, static cache, captured graph",
        peer_value=figures[f"b{last}_peer_ms"],
        target=TARGET_MS.get(last, 0.0),
        met=met and not args.tiny,
        workload=f"{shape}, random weights, context {args.context}, batch {first} and {last}",
        save=args.save,
        **figures,
    )


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1}


def measure_peer(module: Any, device: str, batch: int, args: argparse.Namespace) -> float:
    """Median milliseconds of a captured step."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=module.config, max_cache_len=args.context + 256)
    ids = torch.randint(1, 1000, (batch, args.context), device=device)
    module(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, -1:].clone()
    place = torch.full((batch, 1), args.context, device=device)

    def step() -> Any:
        how = {"position_ids": place, "past_key_values": cache, "use_cache": True}
        return module(token, **how).logits.argmax(-1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    taken = []
    for _ in range(args.rounds):
        started = time.perf_counter()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - started) / 20 * 1e3)
    return round(statistics.median(taken), 3)


def make_loop(args: argparse.Namespace, device: str) -> Any:
    from _ar_models import token_stage
    from _token_loop import TokenLoop

    started = time.perf_counter()
    most = max(args.batches)
    loop = TokenLoop(
        token_stage(
            "build_tiny" if args.tiny else "build_qwen3_8b",
            device,
            max_num_seqs=most,
            max_model_len=args.context + args.tokens + 16,
            enable_prefix_caching=False,
        )
    )
    loop.load_s = round(time.perf_counter() - started, 1)
    return loop


def measure_ours(
    loop: Any, batch: int, args: argparse.Namespace, name: str, params: dict[str, Any]
) -> dict[str, Any]:
    """Median milliseconds between steps while all rows decode, the host's work included."""
    import random

    draw = random.Random(0)
    for row in range(batch):
        length = args.context - args.tokens * 3 // 4  # Measured over the second half of its tokens.
        prompt = [draw.randrange(1, 500) for _ in range(length)]
        request = f"{name}-{batch}-{row}"
        loop.add(request, prompt, max_tokens=args.tokens, ignore_eos=True, **params)
    times: list[float] = []
    before = None
    total = time.perf_counter()
    while True:
        kind = loop.turn()
        if kind is None:
            break
        now = time.perf_counter()
        if kind == "step" and loop.scheduler.counts() == (batch, 0):
            if before is not None:
                times.append((now - before) * 1e3)
            before = now
        else:
            before = None
    total = time.perf_counter() - total
    steady = sorted(times)[: max(1, len(times) - 2)]
    return {
        f"b{batch}_{name}_ms": round(statistics.median(times[-args.tokens // 2 :]), 3),
        f"b{batch}_{name}_p90_ms": round(steady[int(0.9 * len(steady))], 3),
        f"b{batch}_{name}_total_s": round(total, 2),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    flags.add_argument("--context", type=int, default=1024, help="tokens of a prompt (%(default)s)")
    flags.add_argument("--tokens", type=int, default=128, help="generated a row (%(default)s)")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--output", help="a file that is written after every figure")
    flags.add_argument("--save", action="store_true", help="keep it in benchmarks/results/")
    flags.add_argument("--tiny", action="store_true", help="a toy on the CPU: does it run")
    args = flags.parse_args(argv)
    if args.tiny:
        args.context, args.tokens, args.batches = 40, 12, [1, 4]
    return args


if __name__ == "__main__":
    sys.exit(main())
