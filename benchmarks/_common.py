"""What benchmarks share: flags, turns, and the JSON object that each prints as its last line."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BUNDLED = "omnistage/tiny-image"


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--model", default=BUNDLED, help="a Qwen-Image pipeline (%(default)s)")
    flags.add_argument(
        "--rounds", type=int, default=rounds, help="turns of each side (%(default)s)"
    )
    flags.add_argument("--threads", type=int, default=1, help="of torch, both sides (%(default)s)")
    flags.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    return flags


def same_threads_everywhere(threads: int) -> None:
    """For this process and its children. Call it before torch loads."""
    assert "torch" not in sys.modules, "thread counts come too late: torch is loaded"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def model_folder(model: str) -> Path:
    """Where the files are that both sides load."""
    from omnistage.models.registry import find_pipeline

    return find_pipeline(model).model_path


def elapsed_s(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def take_turns(
    sides: Sequence[Callable[[], float]], rounds: int, names: Sequence[str]
) -> list[list[float]]:
    """Seconds of each side, round by round. Who begins changes from round to round."""
    taken: list[list[float]] = [[] for _ in sides]
    for round_ in range(rounds):
        order = range(len(sides)) if round_ % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            taken[index].append(sides[index]())
        latest = ", ".join(f"{n} {t[-1]:.4f} s" for n, t in zip(names, taken, strict=True))
        print(f"round {round_ + 1}: {latest}", flush=True)
    return taken


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 5)


def finish(
    name: str,
    *,
    value: float,
    unit: str,
    peer: str,
    peer_value: float,
    target: float,
    met: bool,
    workload: str,
    save: bool,
    **more: Any,
) -> int:
    """Print the result, and keep it with `save`; the exit code: 1 when the target was missed.

    "load_average" tells a quiet machine (about 1) from one whose times mean little."""
    from omnistage.cli.facts import hardware, versions

    result = {
        "name": name,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": round(value / peer_value, 4),
        "target": target,
        "met": met,
        "hardware": hardware(),
        "versions": versions(),
        "workload": workload,
        "load_average": round(os.getloadavg()[0], 2),
        **more,
    }
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0 if met else 1
