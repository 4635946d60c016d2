"""Measure a server: pictures a second and latencies, under a fixed load. Without --url a server is
started for the measurement. The last line printed is one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator

from omnistage.cli.exits import Exit
from omnistage.cli.facts import hardware, versions
from omnistage.cli.load import Load, Measurement, measure
from omnistage.cli.model_flags import add_model_flags, as_flags
from omnistage.cli.parsing import CommandParser
from omnistage.cli.server_process import ServerEnded, running_server
from omnistage.cli.values import at_least_one, number, size


def add_arguments(parser: CommandParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--url", help="server to measure, as http://127.0.0.1:8000")
    load.add_argument("--peer-url", metavar="URL", help="second server to compare with")
    load.add_argument("--peer-model", metavar="NAME", help="its name of the model")
    load.add_argument("--api-key", metavar="KEY", help="sent to both servers")
    load.add_argument(
        "--requests", type=at_least_one, default=16, metavar="N", help="(%(default)s)"
    )
    load.add_argument(
        "--concurrency", type=at_least_one, default=4, metavar="N", help="(%(default)s)"
    )
    load.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="not measured (%(default)s)"
    )
    load.add_argument("--rounds", type=at_least_one, default=1, metavar="N", help="best of N")
    load.add_argument("--size", type=size, metavar="WxH", help="size in pixels")
    load.add_argument("--steps", type=at_least_one, metavar="N", help="denoising steps")
    load.add_argument("--n", type=at_least_one, default=1, help="pictures a request")
    load.add_argument("--timeout-s", type=number, default=600.0, metavar="S", help="a request's")
    load.add_argument("--target", type=number, metavar="X", help="pictures a second to reach")
    add_model_flags(parser, model_optional=True)


def run(args: argparse.Namespace) -> int:
    load = Load(
        model=args.model,
        requests=args.requests,
        concurrency=args.concurrency,
        warmup=args.warmup,
        size=args.size,
        steps=args.steps,
        pictures=args.n,
        timeout_s=args.timeout_s,
        api_key=args.api_key,
    )
    with _server(args) as url:
        best, peer = _measure(args, load, url)
    for name, one in (("server", best), ("peer", peer)):
        if one is not None:
            print(f"{name:7} {one.describe()}")
    print(json.dumps(_summary(args, load, best, peer)))
    failed = best.failures or (peer is not None and peer.failures)
    missed = args.target is not None and best.pictures_per_s < args.target
    return 1 if failed or missed else 0


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    if args.url:
        yield args.url.rstrip("/")
        return
    try:
        with running_server(args.model, as_flags(args)) as server:
            print(f"started {args.model} in {server.start_s:.1f} s")
            yield server.url
    except ServerEnded as ended:
        raise Exit(ended.exit_code or 1) from ended


def _measure(
    args: argparse.Namespace, load: Load, url: str
) -> tuple[Measurement, Measurement | None]:
    """The best of all rounds; with a peer the two take turns."""
    ours: list[Measurement] = []
    theirs: list[Measurement] = []
    for _ in range(args.rounds):
        ours.append(asyncio.run(measure(url, load)))
        if args.peer_url:
            peer_load = load.for_model(args.peer_model or load.model)
            theirs.append(asyncio.run(measure(args.peer_url.rstrip("/"), peer_load)))

    def rate(one: Measurement) -> float:
        return one.pictures_per_s

    return max(ours, key=rate), max(theirs, key=rate, default=None)


def _summary(
    args: argparse.Namespace, load: Load, ours: Measurement, peer: Measurement | None
) -> dict[str, object]:
    value = ours.pictures_per_s
    return {
        "name": "serve_pictures",
        "value": round(value, 4),
        "unit": "pictures/s",
        "p50_s": round(ours.latency_s(50), 4),
        "p99_s": round(ours.latency_s(99), 4),
        "failures": len(ours.failures),
        "peer": args.peer_url,
        "peer_value": None if peer is None else round(peer.pictures_per_s, 4),
        "ratio": None if peer is None else round(value / peer.pictures_per_s, 4),
        "target": args.target,
        "met": None if args.target is None else value >= args.target,
        "hardware": hardware(),
        "versions": versions(),
        "workload": load.describe(),
    }
