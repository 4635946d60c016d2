"""Look at the cache of streamed weights on disk, verify it, remove from it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from omnistage.cli.parsing import CommandParser
from omnistage.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from omnistage.memory.cache.eviction import EntryState
    from omnistage.memory.cache.folders import StoreFolders

ACTIONS = {
    "ls": ("weight_cache_dir", "json"),
    "verify": ("weight_cache_dir", "entry"),
    "prune": ("weight_cache_dir", "limit_gib", "older_than", "all"),
}
"""With what each takes."""

NAME_LENGTH = 12
DAY_S = 86_400.0
LOCK_WAIT_S = 30.0


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "action",
        choices=list(ACTIONS),
        help="ls: what is there; verify: read it all and compare digests; prune: remove unused",
    )
    parser.add_argument("entry", nargs="?", help="verify: one entry, by the beginning of its name")
    parser.add_argument(
        "--weight-cache-dir",
        metavar="FOLDER",
        help="as in a deployment; default: OMNISTAGE_CACHE or the user's cache folder",
    )
    parser.add_argument("--json", action="store_true", default=None, help="ls: as JSON")
    parser.add_argument(
        "--limit-gib",
        type=_not_negative,
        metavar="N",
        help="prune: the least recently used until N GiB are left",
    )
    parser.add_argument(
        "--older-than", type=_not_negative, metavar="DAYS", help="prune: not used for so long"
    )
    parser.add_argument("--all", action="store_true", default=None, help="prune: all")


def run(args: argparse.Namespace) -> int:
    _check_flags(args)
    from omnistage.memory.cache.folders import StoreFolders
    from omnistage.memory.cache.location import weight_cache_folder

    folders = StoreFolders(weight_cache_folder(args.weight_cache_dir))
    try:
        return int({"ls": _list, "verify": _verify, "prune": _prune}[args.action](args, folders))
    except OSError as error:
        raise ConfigurationError(f"{folders.root} cannot be used: {error}") from error


def _check_flags(args: argparse.Namespace) -> None:
    given = [
        name
        for name in ("entry", "json", "limit_gib", "older_than", "all")
        if getattr(args, name) is not None
    ]
    surplus = [name for name in given if name not in ACTIONS[args.action]]
    if surplus:
        raise ConfigurationError(
            f"cache {args.action} takes no {_spelled(surplus[0])}; see omnistage cache --help"
        )
    if args.action == "prune" and len(given) != 1:
        raise ConfigurationError(
            "cache prune needs one of --limit-gib N, --older-than DAYS and --all"
        )


def _spelled(name: str) -> str:
    return "ENTRY" if name == "entry" else f"--{name.replace('_', '-')}"


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def _list(args: argparse.Namespace, folders: StoreFolders) -> int:
    from omnistage.memory.cache.eviction import states
    from omnistage.memory.plan import gib

    found = states(folders)[::-1]
    total_bytes = sum(state.nbytes for state in found)
    if args.json:
        entries = [_described(state) for state in found]
        report = {"folder": str(folders.root), "bytes": total_bytes, "entries": entries}
        print(json.dumps(report, indent=2))
        return 0
    for state in found:
        entry = _described(state)
        print(
            f"{state.name[:NAME_LENGTH]}  {gib(state.nbytes):>10}  {entry['component']}, "
            f"{entry['component_class']}, used {_ago(state.used_s)}"
            f"{', in use' if state.in_use else ''}"
        )
    print(f"{len(found)} entries, {gib(total_bytes)}, in {folders.root}")
    return 0


def _described(state: EntryState) -> dict[str, Any]:
    manifest = state.manifest
    return {
        "name": state.name,
        "component": manifest.component if manifest else "unreadable",
        "component_class": manifest.component_class if manifest else "unreadable",
        "blocks": len(manifest.blocks) if manifest else 0,
        "bytes": state.nbytes,
        "created_s": manifest.created_s if manifest else None,
        "used_s": state.used_s,
        "in_use": state.in_use,
        "libraries": dict(manifest.libraries) if manifest else {},
    }


def _ago(time_s: float) -> str:
    passed_s = max(time.time() - time_s, 0.0)
    for unit, length_s in (("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if passed_s >= 2 * length_s:
            return f"{passed_s / length_s:.0f} {unit} ago"
    return "just now"


def _verify(args: argparse.Namespace, folders: StoreFolders) -> int:
    from omnistage.memory.cache.eviction import states
    from omnistage.memory.plan import gib

    chosen = _chosen(states(folders), args.entry)
    damaged = 0
    for state in chosen:
        problems = list(_damages(state))
        for problem in problems:
            print(f"{state.name[:NAME_LENGTH]}  DAMAGED: {problem}")
        if not problems:
            print(f"{state.name[:NAME_LENGTH]}  ok, {gib(state.nbytes)}", flush=True)
        damaged += bool(problems)
    print(f"{len(chosen)} verified, {damaged} damaged, in {folders.root}")
    if damaged:
        print("a damaged entry is removed when it is next used; remove its folder to do so now")
    return 1 if damaged else 0


def _damages(state: EntryState) -> Iterator[str]:
    from omnistage.memory.cache.entry import Entry
    from omnistage.memory.cache.errors import EntryDamagedError

    try:
        yield from Entry.read(state.folder).damages()
    except EntryDamagedError as error:
        yield error.what


def _chosen(found: Sequence[EntryState], name: str | None) -> Sequence[EntryState]:
    if name is None:
        return found
    chosen = [state for state in found if state.name.startswith(name)]
    if len(chosen) != 1:
        there = ", ".join(state.name[:NAME_LENGTH] for state in found) or "none"
        what = "several entries begin" if chosen else "no entry begins"
        raise ConfigurationError(f"{what} with {name!r}; there are: {there}")
    return chosen


def _prune(args: argparse.Namespace, folders: StoreFolders) -> int:
    from omnistage.memory.cache.eviction import remove_if, surplus
    from omnistage.memory.cache.index import remove_unreachable
    from omnistage.memory.cache.lock import locked
    from omnistage.memory.plan import gib

    if not folders.root.is_dir():
        print(f"nothing to remove: there is no {folders.root}")
        return 0
    folders.make()
    with locked(folders.store_lock, wait_s=LOCK_WAIT_S):
        if args.limit_gib is not None:
            gone, kept = surplus(folders, int(args.limit_gib * 2**30))
        else:
            before_s = time.time() - (args.older_than or 0.0) * DAY_S
            gone, kept = remove_if(folders, lambda state: args.all or state.used_s < before_s)
        left_by_dead = folders.remove_all_stale()
        remove_unreachable(folders)
    for state in gone:
        print(f"removed {state.name[:NAME_LENGTH]}  {gib(state.nbytes)}")
    for state in kept:
        print(f"left    {state.name[:NAME_LENGTH]}  {gib(state.nbytes)}, in use")
    if left_by_dead:
        print(f"removed {left_by_dead} unfinished")
    print(f"{gib(sum(state.nbytes for state in gone))} removed from {folders.root}")
    return 0
