"""From nothing to ready: `omnistage serve` over bare import and load of the same pipeline.

Both sides are fresh processes. Ours counts from the start of the process until `GET /ready`
answers 200, and must then make a picture; the peer counts until `from_pretrained` has returned.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from _common import finish, median, model_folder, parser, same_threads_everywhere, take_turns

ALLOWANCE_S = 2.0
DEADLINE_S = 300.0
POLL_INTERVAL_S = 0.02

BARE_LOAD = """
import sys
import torch
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
print(type(pipeline).__name__, flush=True)
"""


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__, rounds=7)
    flags.add_argument("--side", type=int, default=128, help="pixels of the check (%(default)s)")
    flags.add_argument("--warmup", type=int, default=1, help="unmeasured turns (%(default)s)")
    args = flags.parse_args(argv)
    same_threads_everywhere(args.threads)
    folder = model_folder(args.model)
    class_name = json.loads((folder / "model_index.json").read_text())["_class_name"]
    sides = [lambda: serve(args.model, args.side), lambda: bare_load(folder, class_name)]
    for _ in range(args.warmup):  # Files into the page cache, modules into bytecode.
        for side in sides:
            side()
    value, peer_value = map(median, take_turns(sides, args.rounds, ["serve", "bare"]))
    target = round(peer_value + ALLOWANCE_S, 5)
    name = args.model if not Path(args.model).exists() else Path(args.model).name
    return finish(
        "startup",
        value=value,
        unit="s",
        peer="import of torch and diffusers, then DiffusionPipeline.from_pretrained, fresh process",
        peer_value=peer_value,
        target=target,
        met=value <= target,
        workload=(
            f"omnistage serve {name}, from the start of the process until /ready answers 200; CPU, "
            f"{args.threads} thread(s), files cached; median of {args.rounds}, alternating; "
            f"target: the peer + {ALLOWANCE_S:g} s"
        ),
        save=args.save,
    )


def serve(model: str, side: int) -> float:
    port = free_port()
    command = [sys.executable, "-m", "omnistage", "serve", model, "--port", str(port)]
    command += ["--device", "cpu", "--log-level", "error"]
    started = time.perf_counter()
    with child(command) as server:
        while get_ready(port) != 200:
            assert server.poll() is None, f"the server ended with code {server.returncode}"
            assert time.perf_counter() - started < DEADLINE_S, "not ready in time"
            time.sleep(POLL_INTERVAL_S)
        took_s = time.perf_counter() - started
        check_a_picture(port, side)
    return took_s


def bare_load(folder: Path, class_name: str) -> float:
    started = time.perf_counter()
    with child([sys.executable, "-c", BARE_LOAD, str(folder)]) as loader:
        assert loader.stdout is not None
        line = loader.stdout.readline().strip()
        took_s = time.perf_counter() - started
        assert line == class_name, f"the bare load said {line!r}"
        loader.wait(DEADLINE_S)
    return took_s


@contextlib.contextmanager
def child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended, and waited for, whatever happens."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            finally:
                process.kill()


def get_ready(port: int) -> int | None:
    """The status, or None while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status
    except ConnectionError:
        return None
    finally:
        connection.close()


def check_a_picture(port: int, side: int) -> None:
    import httpx

    from omnistage.cli.http_client import GENERATIONS, generation_body, open_picture, read_pictures

    body = generation_body(
        "a large green triangle", size=f"{side}x{side}", seed=1, num_inference_steps=2
    )
    answer = httpx.post(
        f"http://127.0.0.1:{port}{GENERATIONS}", json=body, timeout=DEADLINE_S, trust_env=False
    )
    (picture,) = map(open_picture, read_pictures(answer))
    assert picture.size == (side, side), f"the picture is {picture.size}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
