"""Lists of names in messages for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_SHOWN = 5


def and_more(names: Iterable[str]) -> str:
    """At most five names, then how many there are besides."""
    listed = list(names)
    rest = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that looks most like `name`, if any does."""
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return found[0] if found else None


def with_nearest(names: Sequence[str], candidates: Sequence[str]) -> str:
    """As `and_more`, each name followed by the nearest candidate."""
    shown = []
    for name in names[:_SHOWN]:
        near = nearest(name, candidates)
        shown.append(f"{name} (nearest: {near})" if near else name)
    return and_more([*shown, *names[_SHOWN:]])
