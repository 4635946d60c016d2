"""Two processes that stream one model from the same files: how much memory the second one adds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ANSWER_S = 240
FIELDS = ("Pss", "Pss_Anon", "Pss_File", "Private_Dirty", "Shared_Clean")


def measure_sharing(folder: Path, model_bytes: int, model: str = "qwen") -> dict[str, Any]:
    """`fraction`: what the sum of both processes' proportional set sizes exceeds that of the first
    one alone by, of the model's bytes. The pins are the kernel's count of pages pinned and not yet
    released, of the whole machine, which others may change too."""
    pins = {"before": pinned_pages()}
    first = Worker(folder, model)
    try:
        alone = first.ask("measure")
        pins["one"] = pinned_pages()
        second = Worker(folder, model)
        try:
            ready = second.ask("measure")  # Only now has it loaded.
            pair = [first.ask("measure"), ready]
            pins["two"] = pinned_pages()
            closed = first.ask("close")
            pins["one_closed"] = pinned_pages()
        finally:
            second.kill()
        pins["other_killed"] = pinned_pages()
    finally:
        first.kill()
    pins["none"] = pinned_pages()
    added = sum(one["Pss"] for one in pair) - alone["Pss"]
    return {
        "fraction": round(added / model_bytes, 4),
        "added_gb": round(added / 1e9, 3),
        "alone": alone,
        "pair": pair,
        "locked_over_planned": round(alone["locked_bytes"] / alone["planned_bytes"], 4),
        "locked_bytes_after_close": closed["locked_bytes"],
        "pinned_pages": pins,
    }


def pinned_pages() -> int | None:
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    if "nr_foll_pin_acquired" not in counts:
        return None
    return int(counts["nr_foll_pin_acquired"]) - int(counts["nr_foll_pin_released"])


def proportional(pid: int) -> dict[str, int]:
    """Bytes, from the kernel's sums over all mappings."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in FIELDS:
            found[name] = int(rest.split()[0]) * 1024
    return found


class Worker:
    """A process that streams, and answers lines with lines."""

    def __init__(self, folder: Path, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a worker ended with {self._process.wait(ANSWER_S)}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)


def serve(folder: Path, model: str) -> None:
    import os

    from _offload_models import MODELS, denoiser_plan
    from _offload_sides import COMPONENT, forward, open_ours, place

    from omnistage.platforms.registry import platform_of

    device = "cuda:0"
    shape, platform = MODELS[model], platform_of(device)
    plan = denoiser_plan(shape, folder, device)
    placement = place(plan, 0.0)
    ours = open_ours(plan, placement, platform)
    inputs = shape.inputs(rows=1, height=512, width=512, frames=1, device=device)
    forward(ours.module, inputs)()
    platform.synchronize(device)
    weights: Any = ours.weights
    for line in sys.stdin:
        if line.strip() == "close":
            ours.close()
        answer = proportional(os.getpid()) | {
            "locked_bytes": weights.locked_bytes,
            "planned_bytes": placement.components[COMPONENT].streamed_bytes,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
