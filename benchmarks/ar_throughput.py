"""Tokens a second on a CPU: many requests of mixed lengths at once, ours beside its peers.

Greedy answers from random weights of the SmolLM2-135M shape (or `--model`, a folder or GGUF file):
the whole engine with its stage in a process of its own, and its loop without messages; unmodified
`transformers`: `generate` one request after another, `generate` of one padded batch (only the
wanted tokens count), continuous batching; with `--vllm-python` also vLLM's build for CPUs, at a
58 M Qwen3 shape too. Each side is a process with the same dtype, threads and requests; they take
turns, after two requests each that do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import finish, parser, take_turns

OWN, LOOP, VLLM = "omni", "loop", "vllm"
PEERS = {"one_by_one": 4.0, "padded": 1.3, "continuous": 1.3, VLLM: 1.0}
"""Side → how many times as fast ours should be."""
QWEN3_CONCURRENCY = (1, 8, 32)
PROMPT_TOKENS, ANSWER_TOKENS = (16, 128), (16, 96)
SIDES_FILE = Path(__file__).parent / "_throughput_sides.py"
VLLM_CACHE_GIB = 2
WARM_UP_REQUESTS = 2
CLOSE_TIMEOUT_S = 120


class Side:
    """A process that runs the workload once a call."""

    def __init__(self, name: str, python: str, args: argparse.Namespace, *what: str) -> None:
        self.name = name
        command = [python, str(SIDES_FILE), name, *what]
        self.tokens: list[list[int]] = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if args.verbose else subprocess.DEVNULL,
            env=environment(name, python, args.threads),
            text=True,
        )
        self.about: dict[str, Any] = {}

    def wait(self) -> None:
        """Until it has loaded."""
        self.about = self._answer()
        print(f"{self.name}: {json.dumps(self.about)[:300]}", flush=True)

    def run(self, count: int) -> float:
        """Seconds for the first `count` requests."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.tokens = answer["tokens"]
        return float(answer["elapsed_s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"{self.name}: killed, it did not end by itself", flush=True)
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(timeout=120)
            raise RuntimeError(f"side {self.name} ended with {code}; --verbose shows why")
        return json.loads(line)


def environment(name: str, python: str, threads: int) -> dict[str, str]:
    """The same number of threads, which sleep instead of spinning, for all sides; for vLLM what its
    manual recommends: both cores bound, Intel's OpenMP loaded first."""
    more = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "3000",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if name == VLLM:
        more["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        more["VLLM_CPU_KVCACHE_SPACE"] = str(VLLM_CACHE_GIB)
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        if openmp.exists():
            more["LD_PRELOAD"] = str(openmp)
            del more["OMP_WAIT_POLICY"], more["GOMP_SPINCOUNT"]
    return os.environ | more


def workload(requests: int, vocab_size: int) -> dict[str, Any]:
    draw = random.Random(0)
    return {
        "prompts": [
            [draw.randrange(3, vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))]
            for _ in range(requests)
        ],
        "lengths": [draw.randint(*ANSWER_TOKENS) for _ in range(requests)],
        "engine": {
            "max_model_len": 1024,
            "max_num_seqs": requests,
            "enable_prefix_caching": False,
        },
    }


def measure(
    names: list[str],
    folder: str,
    dtype: str,
    given: dict[str, Any],
    counts: tuple[int, ...],
    args: Any,
) -> dict[str, Any]:
    """By number of requests: tokens a second of each side, and how far their tokens agree."""
    sides: list[Side] = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(given, file)
        file.flush()
        try:
            for name in names:
                python = args.vllm_python if name == VLLM else sys.executable
                sides.append(Side(name, python, args, folder, dtype, str(args.threads), file.name))
            for side in sides:
                side.wait()
            return {str(n): race(sides, n, given["lengths"][:n], args.rounds) for n in counts} | {
                "load_s": {side.name: side.about["load_s"] for side in sides},
                "versions": {side.name: v for side in sides if (v := side.about.get("version"))},
            }
        finally:
            for side in sides:
                side.close()


def race(sides: list[Side], count: int, lengths: list[int], rounds: int) -> dict[str, Any]:
    for side in sides:
        side.run(min(count, WARM_UP_REQUESTS))
    load = os.getloadavg()[0]
    runs = [lambda side=side: side.run(count) for side in sides]
    taken = take_turns(runs, rounds, [side.name for side in sides])
    tokens = sum(lengths)
    own = sides[0].tokens
    figures: dict[str, Any] = {
        "tokens_per_s": {
            side.name: round(tokens / statistics.median(seconds), 1)
            for side, seconds in zip(sides, taken, strict=True)
        },
        "seconds": {
            side.name: [round(s, 3) for s in seconds]
            for side, seconds in zip(sides, taken, strict=True)
        },
        "first_tokens_equal": {
            side.name: sum(a[0] == b[0] for a, b in zip(own, side.tokens, strict=True))
            for side in sides[1:]
        },
        "answers_equal": {
            side.name: sum(a == b for a, b in zip(own, side.tokens, strict=True))
            for side in sides[1:]
        },
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
    }
    by_name = figures["tokens_per_s"]
    figures["ratios"] = {
        name: round(by_name[OWN] / by_name[name], 3) for name in PEERS if name in by_name
    }
    print(json.dumps(figures), flush=True)
    return figures


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = [name for name in args.sides if name != VLLM or args.vllm_python]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        for dtype in args.dtypes:
            model = args.model or checkpoint("llama-135m", Path(made))
            given = workload(args.requests, vocab_size=49_000)
            figures[dtype] = measure(names, model, dtype, given, (args.requests,), args)
            if args.vllm_python and not args.skip_qwen3:
                given = workload(max(QWEN3_CONCURRENCY), vocab_size=65_000)
                folder = checkpoint("qwen3-58m", Path(made))
                figures[f"qwen3_58m_{dtype}"] = measure(
                    [OWN, VLLM], folder, dtype, given, QWEN3_CONCURRENCY, args
                )
    found = figures[args.dtypes[0]][str(args.requests)]
    ratios = {dtype: figures[dtype][str(args.requests)]["ratios"] for dtype in args.dtypes}
    return finish(
        "ar_throughput",
        value=found["tokens_per_s"][OWN],
        unit="tokens/s",
        peer="transformers.generate, one request after another",
        peer_value=found["tokens_per_s"]["one_by_one"],
        target=PEERS["one_by_one"],
        met=all(ratio >= PEERS[name] for one in ratios.values() for name, ratio in one.items()),
        workload=(
            f"{args.requests} requests at once, prompts of {PROMPT_TOKENS[0]} to "
            f"{PROMPT_TOKENS[1]} tokens, answers of {ANSWER_TOKENS[0]} to {ANSWER_TOKENS[1]}, "
            f"greedy, {Path(args.model).name if args.model else 'random weights of SmolLM2-135M'}, "
            f"{args.threads} threads, {' and '.join(args.dtypes)}; median of {args.rounds} rounds"
        ),
        save=args.save,
        targets=PEERS,
        ratios=ratios,
        figures=figures,
    )


def checkpoint(shape: str, folder: Path) -> str:
    from _ar_models import save_checkpoint

    if not (folder / shape).exists():
        save_checkpoint(shape, folder / shape)
    return str(folder / shape)


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, rounds=3)
    flags.set_defaults(model=None, threads=2)
    flags.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    flags.add_argument("--requests", type=int, default=16, help="at once (%(default)s)")
    flags.add_argument("--sides", nargs="+", default=[OWN, LOOP, *PEERS], help="%(default)s")
    flags.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu")
    flags.add_argument("--skip-qwen3", action="store_true", help="without the 58 M Qwen3 shape")
    flags.add_argument("--verbose", action="store_true", help="what the sides write to stderr")
    args = flags.parse_args(argv)
    if args.sides[:1] != [OWN] or "one_by_one" not in args.sides:
        flags.error(f"--sides begins with {OWN} and has one_by_one, got {' '.join(args.sides)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
