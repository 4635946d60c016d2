"""Values of flags that only commands know."""

from __future__ import annotations

import argparse
import re

_SIZE = re.compile(r"^(\d{1,6})[xX×](\d{1,6})$")


def size(text: str) -> tuple[int, int]:
    """(width, height) in pixels from "1024x768"."""
    match = _SIZE.match(text)
    if match is None or "0" in (match[1], match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write WIDTHxHEIGHT, as 1024x768")
    return int(match[1]), int(match[2])


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
