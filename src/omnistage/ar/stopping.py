"""When a sequence ends, and which of its text may leave before that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from omnistage.contracts.sampling import OmniTokenSamplingParams

STOP, LENGTH = "stop", "length"


class Detokenizer(Protocol):
    """Turns ids into text piece by piece, never part of a character (`ar.detokenizer`)."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Matcher(Protocol):
    """Where a sequence stands in its grammar (`ar.grammar`)."""

    def accept(self, token: int) -> None: ...

    def is_terminated(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """`stop_reason` is the stop string or stop id that was met, None for the end of sequence."""

    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(slots=True)
class StopStrings:
    """Looks for stop strings in text that comes in pieces. What may be the start of one is held
    back until it is none."""

    stops: Sequence[str]
    include: bool = False
    _held: str = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(text that may leave, the stop string met). Without `may_stop` none ends the text."""
        if not self.stops:
            return text, None
        text = self._held + text
        self._held = ""
        found = self._first(text) if may_stop else None
        if found is not None:
            first, stop = found
            return text[: first + len(stop) if self.include else first], stop
        kept = self._longest_start(text)
        if kept:
            text, self._held = text[:-kept], text[-kept:]
        return text, None

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> tuple[int, str] | None:
        """The match that is complete first; of those, the one that starts first."""
        places = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        return min(places)[1:] if places else None

    def _longest_start(self, text: str) -> int:
        """Length of the longest end of `text` that is the start of a stop string."""
        longest = min(len(text), max(len(stop) for stop in self.stops) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self.stops):
                return length
        return 0


@dataclass(slots=True)
class OutputText:
    """One sequence's tokens become text until one of them ends it.

    `max_output` is how many tokens it may generate. Without a detokenizer there is no text.
    """

    params: OmniTokenSamplingParams
    eos_token_ids: frozenset[int]
    max_output: int
    detokenizer: Detokenizer | None = None
    grammar: Matcher | None = None
    _stops: StopStrings | None = None
    _count: int = 0

    def __post_init__(self) -> None:
        if self.detokenizer is not None:
            self._stops = StopStrings(self.params.stop, self.params.include_stop_str_in_output)

    def push(self, token: int) -> tuple[str, Ending | None]:
        """Text that may leave with this token, and how the sequence ends with it, if it does."""
        self._count += 1
        may_stop = self._count >= self.params.min_tokens
        ending = self._ending_of(token) if may_stop else None
        if self.grammar is not None:
            self.grammar.accept(token)
            if ending is None and self.grammar.is_terminated():
                ending = Ending(STOP)
        shown = ending is None or not self._is_stop_token(token)
        text, stop = self._text(token if shown else None, may_stop, last=ending is not None)
        if stop is not None:
            return text, Ending(STOP, stop)
        if ending is None and self._count >= self.max_output:
            tail, stop = self._text(None, may_stop, last=True)
            ending = Ending(LENGTH) if stop is None else Ending(STOP, stop)
            text += tail
        return text, ending

    def _ending_of(self, token: int) -> Ending | None:
        if token in self.params.stop_token_ids:
            return Ending(STOP, token)
        if token in self.eos_token_ids and not self.params.ignore_eos:
            return Ending(STOP)
        return None

    def _is_stop_token(self, token: int) -> bool:
        """Stop tokens are no text unless stop strings are."""
        return self._ending_of(token) is not None and not self.params.include_stop_str_in_output

    def _text(self, token: int | None, may_stop: bool, *, last: bool) -> tuple[str, str | None]:
        if self.detokenizer is None or self._stops is None:
            return "", None
        new = self.detokenizer.push([token]) if token is not None else ""
        if last:
            new += self.detokenizer.finish()
        text, stop = self._stops.push(new, may_stop=may_stop)
        if last and stop is None:
            text += self._stops.flush()
        return text, stop
