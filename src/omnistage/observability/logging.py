"""Logs: one logger tree, "omnistage", whose every line says which request and stage it is about.

Prompts, outputs and bodies never go into a log; ids, sizes, times and errors do.
"""

from __future__ import annotations

import json as jsonlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from omnistage.contracts.errors import ConfigurationError

ROOT = "omnistage"
LEVELS = ("debug", "info", "warning", "error", "critical")
NONE = "-"


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a process logs; processes that it starts log the same way."""

    level: str = "info"
    json: bool = False


DEFAULT_LOGS = LogSettings()

_request_id: ContextVar[str | None] = ContextVar("omnistage_request_id", default=None)
_stage_id: ContextVar[int | None] = ContextVar("omnistage_stage_id", default=None)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below "omnistage" whatever its name."""
    below = name == ROOT or name.startswith(f"{ROOT}.")
    return logging.getLogger(name if below else f"{ROOT}.{name}")


@contextmanager
def request_scope(request_id: str, stage_id: int | None = None) -> Iterator[None]:
    """Lines logged inside, in this thread or task, carry these ids. An inner scope without a stage
    keeps the outer one's."""
    request_token = _request_id.set(request_id)
    stage_token = _stage_id.set(_stage_id.get() if stage_id is None else stage_id)
    try:
        yield
    finally:
        _stage_id.reset(stage_token)
        _request_id.reset(request_token)


def configure_logging(
    level: str = "info", json: bool = False, stream: TextIO | None = None
) -> None:
    """Write the "omnistage" tree to `stream` (standard error), as text or one JSON object a line.

    Touches no other logger. A second call replaces what the first set. Raises
    `ConfigurationError` for an unknown level.
    """
    if level.lower() not in LEVELS:
        raise ConfigurationError(f"unknown log level {level!r}; allowed: {', '.join(LEVELS)}")
    handler = OmniHandler(stream)
    handler.addFilter(_attach_scope)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    logger = logging.getLogger(ROOT)
    for old in [h for h in logger.handlers if isinstance(h, OmniHandler)]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


class OmniHandler(logging.StreamHandler[TextIO]):
    """The handler that `configure_logging` owns, and replaces."""


class TextFormatter(logging.Formatter):
    """`time LEVEL logger request_id=… stage=… message`, and a traceback below it."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(name)s "
            "request_id=%(request_id)s stage=%(stage)s %(message)s"
        )

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _utc(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Further lines are indented: whoever sends us a newline cannot forge an entry."""
        lines = super().formatMessage(record).splitlines()
        return "\n  | ".join(map(_printable, lines))


class JsonFormatter(logging.Formatter):
    """Keys: time, level, logger, request_id, stage, message and, with a traceback, exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": _request_id.get(),
            "stage": _stage_id.get(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return jsonlib.dumps(entry)


def _attach_scope(record: logging.LogRecord) -> bool:
    request_id, stage_id = _request_id.get(), _stage_id.get()
    record.request_id = NONE if request_id is None else request_id
    record.stage = NONE if stage_id is None else stage_id
    return True


def _utc(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
