"""Serve the bundled model, ask it for one picture over HTTP, save it and show how to go on."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from pathlib import Path

from omnistage.cli.exits import Exit
from omnistage.cli.http_client import (
    GENERATIONS,
    generation_body,
    open_picture,
    read_pictures,
)
from omnistage.cli.model_flags import DEFAULT_MODEL
from omnistage.cli.parsing import CommandParser
from omnistage.cli.server_process import ServerEnded, running_server

PROMPT = "a small red circle above a blue square on a yellow background"
REQUEST_DEADLINE_S = 300.0

_GO_ON = """\
go on:
  your own prompt   {command} generate --prompt "a large green triangle" --output triangle.png
  a server          {command} serve {model} --port 8000
  ask it            curl http://127.0.0.1:8000/v1/images/generations \\
                      -H 'Content-Type: application/json' \\
                      -d '{{"prompt": "{prompt}"}}'
  from Python       from openai import OpenAI
                    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
                    client.images.generate(model="{model}", prompt="{prompt}")
  another model     {command} serve PATH_OR_HUB_ID   (any diffusers pipeline that makes pictures)
"""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("--prompt", default=PROMPT, help='what to make ("%(default)s")')
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help="where the picture goes (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    print(f"starting a server with {DEFAULT_MODEL} …", flush=True)
    try:
        with running_server(DEFAULT_MODEL, ["--log-level", "warning"]) as server:
            print(f"ready after {server.start_s:.1f} s: {server.url}")
            print(f'POST {server.url}{GENERATIONS}   "{args.prompt}"', flush=True)
            started = time.monotonic()
            data = _ask(server.url, args.prompt, args.seed)
            elapsed_s = time.monotonic() - started
    except ServerEnded as ended:
        raise Exit(ended.exit_code or 1) from ended
    path = _save(data, args.prompt, args.output_dir)
    width, height = open_picture(data).size
    print(f"a {width}x{height} picture after {elapsed_s:.1f} s: {path}")
    print("the server has stopped\n")
    print(_GO_ON.format(command=shown_command(), model=DEFAULT_MODEL, prompt=PROMPT), end="")
    return 0


def shown_command() -> str:
    """How this shell would start us: the bare name only where it leads here."""
    ours = Path(sys.executable).with_name("omnistage")
    on_path = shutil.which("omnistage")
    if on_path is not None and Path(on_path) == ours:
        return "omnistage"
    if not ours.exists():
        return f"{sys.executable} -m omnistage"
    within = Path.cwd() in ours.parents[1:]
    return str(ours.relative_to(Path.cwd()) if within else ours)


def _ask(url: str, prompt: str, seed: int) -> bytes:
    import httpx

    response = httpx.post(
        f"{url}{GENERATIONS}",
        json=generation_body(prompt, seed=seed, model=DEFAULT_MODEL),
        timeout=REQUEST_DEADLINE_S,
        trust_env=False,
    )
    return read_pictures(response)[0]


def _save(data: bytes, prompt: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:80] or "picture"
    path = folder / f"{name}.png"
    path.write_bytes(data)
    return path
