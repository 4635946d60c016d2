"""Speech of Qwen3-Omni on one GPU: time to the first sound and real-time factor, by concurrency.

The Qwen3-Omni-30B-A3B shape with random bfloat16 weights, text in, text and speech out, every
request the same number of tokens and frames. TTFP: from asking until the first sound is at the
caller. RTF: from asking until the last sound, over the sound's length. Ours in one process for all
three stages, then in a process for each, then one process without asynchronous scheduling; the peer
is the unmodified transformers `generate`, one request. `--tiny` runs a toy on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _common import finish

FRAME_S = 0.08
SAMPLE_RATE = 24_000
TARGETS = {"ttfp_ms": {1: 200.0}, "rtf": {1: 0.13, 32: 0.47}}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shape, device = ("tiny", "cpu") if args.tiny else ("qwen3-omni-30b-a3b", "cuda:0")
    figures: dict[str, Any] = {}

    def keep(**more: Any) -> None:
        figures.update(more)
        print(json.dumps(more), flush=True)
        if args.output:
            Path(args.output).write_text(json.dumps(figures, indent=1))

    if "peer" in args.parts:
        keep(transformers=measure_peer(shape, device, args))
    settings = {
        "one_process": {"process": "speech"},
        "three_processes": {},
        "synchronous": {"process": "speech", "async_scheduling": False},
    }
    for name, setting in settings.items():
        if name not in args.parts:
            continue
        numbers = [1] if name == "synchronous" else args.concurrency
        try:
            keep(**{name: asyncio.run(measure(shape, device, setting, numbers, args, keep, name))})
        except Exception as error:
            keep(**{f"{name}_failed": f"{type(error).__name__}: {error}"})
            if args.tiny:
                raise
    best = figures.get("one_process") or figures.get("three_processes") or {}
    first = best.get("1", {})
    met = bool(best) and all(
        best[str(number)][what] <= limit
        for what, limits in TARGETS.items()
        for number, limit in limits.items()
        if str(number) in best
    )
    return finish(
        "omni_speech",
        value=first.get("ttfp_ms", 0.0),
        unit="ms to the first sound, one request",
        peer="transformers generate, one request",
        peer_value=figures.get("transformers", {}).get("total_ms", 1.0),
        target=TARGETS["ttfp_ms"][1],
        met=met and not args.tiny,
        workload=(
            f"{shape}, random weights, prompt of {args.prompt} tokens, {args.tokens} text tokens, "
            f"{args.frames} frames of speech ({args.frames * FRAME_S:g} s)"
        ),
        save=args.save,
        **figures,
    )


def measure_peer(shape: str, device: str, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of one whole answer of a few frames, and a frame; there is no sound before the
    end. Of a few frames only: one takes long."""
    import torch
    from _omni_models import config_of, make, prompt_ids
    from transformers import Qwen3OmniMoeForConditionalGeneration

    config = config_of(shape)
    model = make(Qwen3OmniMoeForConditionalGeneration, config, device)
    ids = torch.tensor([prompt_ids(config, args.prompt, 0)], device=device)
    codes = config.code2wav_config.codebook_size
    vocabulary = config.talker_config.text_config.vocab_size
    taken = {}
    for frames in (args.peer_frames // 4, args.peer_frames // 4, args.peer_frames):
        started = time.perf_counter()
        model.generate(
            input_ids=ids,
            thinker_max_new_tokens=args.peer_tokens,
            thinker_min_new_tokens=args.peer_tokens,
            thinker_do_sample=False,
            talker_max_new_tokens=frames,
            talker_min_new_tokens=frames,
            talker_suppress_tokens=list(range(codes, vocabulary)),
            speaker="Ethan",
        )
        taken[frames] = (time.perf_counter() - started) * 1e3
    few, many = args.peer_frames // 4, args.peer_frames
    frame_ms = (taken[many] - taken[few]) / (many - few)
    answer_ms = taken[few] - few * frame_ms
    scaled_ms = answer_ms * args.tokens / args.peer_tokens + frame_ms * args.frames
    del model
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return {
        "frame_ms": round(frame_ms, 2),
        "text_token_ms": round(answer_ms / args.peer_tokens, 2),
        "total_ms": round(scaled_ms, 1),
        "rtf": round(scaled_ms / 1e3 / (args.frames * FRAME_S), 3),
    }


async def measure(
    shape: str,
    device: str,
    setting: dict[str, Any],
    numbers: list[int],
    args: argparse.Namespace,
    keep: Any,
    name: str,
) -> dict[str, Any]:
    from _omni_models import omni_config

    from omnistage import AsyncOmni

    most = max(args.concurrency)
    config = omni_config(
        shape,
        device,
        max_num_seqs=most,
        init_timeout=400,
        stage_overrides={
            0: {"max_model_len": 2048, "kv_cache_gib": 0.1 if args.tiny else 8},
            1: {"max_model_len": 2048, "kv_cache_gib": 0.1 if args.tiny else 4},
        },
        **setting,
    )
    found: dict[str, Any] = {}
    started = time.perf_counter()
    async with AsyncOmni(config=config) as engine:
        found["start_s"] = round(time.perf_counter() - started, 1)
        await run(engine, shape, 1, 1, args)
        for number in numbers:
            requests = max(number * args.waves, 3)
            found[str(number)] = await run(engine, shape, number, requests, args)
            keep(**{f"{name}_so_far": found})
        found["talker"] = await engine.call_stage(1, "executor_stats")
        found["thinker"] = await engine.call_stage(0, "executor_stats")
    return found


async def run(
    engine: Any, shape: str, concurrency: int, requests: int, args: argparse.Namespace
) -> dict[str, float]:
    """`requests` by `concurrency` clients, each asking anew when it has heard its last sound."""
    from _omni_models import config_of, prompt_ids

    config = config_of(shape)
    waiting = iter(range(requests))
    results: list[dict[str, float]] = []

    async def client() -> None:
        for index in waiting:
            ids = prompt_ids(config, args.prompt, index)
            results.append(await ask(engine, config, ids, index, args))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    taken_s = time.perf_counter() - started

    def middle(name: str) -> float:
        return round(statistics.median(result[name] for result in results), 4)

    def worst(name: str) -> float:
        return round(sorted(result[name] for result in results)[int(0.99 * len(results))], 4)

    return {
        "ttft_ms": middle("ttft_ms"),
        "ttfp_ms": middle("ttfp_ms"),
        "ttfp_p99_ms": worst("ttfp_ms"),
        "rtf": middle("rtf"),
        "rtf_p99": worst("rtf"),
        "underruns": sum(result["underruns"] for result in results),
        "requests_per_s": round(requests / taken_s, 3),
        "sound_s_per_s": round(requests * args.frames * FRAME_S / taken_s, 2),
    }


async def ask(
    engine: Any, config: Any, ids: list[int], seed: int, args: argparse.Namespace
) -> dict[str, float]:
    from omnistage.contracts.sampling import GenericParams, OmniTokenSamplingParams

    end = config.talker_config.codec_eos_token_id
    params = [
        OmniTokenSamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True),
        OmniTokenSamplingParams(
            max_tokens=args.frames + 1, ignore_eos=True, logit_bias={end: -100.0}, seed=seed
        ),
        GenericParams(),
    ]
    started = time.perf_counter()
    text_s = sound_s = None
    played_until, heard_s, underruns = 0.0, 0.0, 0
    async for event in engine.generate({"prompt_token_ids": ids}, sampling_params_list=params):
        now = time.perf_counter() - started
        samples = event.tensors.get("audio")
        if samples is not None and len(samples):
            sound_s = sound_s or now
            if now > played_until > 0:
                underruns += 1
            played_until = max(played_until, now) + len(samples) / SAMPLE_RATE
            heard_s += len(samples) / SAMPLE_RATE
        elif text_s is None and event.stage_id == 0:
            text_s = now
    total_s = time.perf_counter() - started
    assert heard_s > 0.9 * (args.frames - 1) * FRAME_S, f"only {heard_s} s of sound"
    return {
        "ttft_ms": (text_s or total_s) * 1e3,
        "ttfp_ms": (sound_s or total_s) * 1e3,
        "rtf": total_s / heard_s,
        "underruns": underruns,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__)
    parts = ["peer", "one_process", "three_processes", "synchronous"]
    flags.add_argument("--parts", nargs="+", choices=parts, default=parts)
    flags.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    flags.add_argument("--waves", type=int, default=2, help="requests a client (%(default)s)")
    flags.add_argument("--prompt", type=int, default=64, help="tokens of a question (%(default)s)")
    flags.add_argument("--tokens", type=int, default=48, help="of the answer (%(default)s)")
    flags.add_argument("--frames", type=int, default=150, help="of speech (%(default)s)")
    flags.add_argument("--peer-frames", type=int, default=16)
    flags.add_argument("--peer-tokens", type=int, default=8)
    flags.add_argument("--output", help="a file that is written after every figure")
    flags.add_argument("--save", action="store_true", help="keep it in benchmarks/results/")
    flags.add_argument("--tiny", action="store_true", help="a toy on the CPU: does it run")
    args = flags.parse_args(argv)
    if args.tiny:
        args.concurrency, args.prompt, args.tokens, args.frames = [1, 2], 8, 8, 30
        args.peer_frames, args.peer_tokens, args.waves = 8, 4, 1
    return args


if __name__ == "__main__":
    sys.exit(main())
