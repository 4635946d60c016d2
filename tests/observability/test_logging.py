from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import omnistage
from omnistage.contracts.errors import ConfigurationError
from omnistage.observability.logging import (
    OmniHandler,
    configure_logging,
    get_logger,
    request_scope,
)

USER_CONTENT = {
    "prompt",
    "prompts",
    "negative_prompt",
    "text",
    "content",
    "body",
    "inputs",
    "images",
}
LOG_CALLS = {"debug", "info", "warning", "error", "critical", "exception", "log"}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("omnistage")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.mark.invariant("OBS-INV-001")
def test_every_line_carries_its_request_and_stage(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    logger = get_logger("engine.test")
    logger.info("outside")
    with request_scope("req-1"):
        logger.info("request")
        with request_scope("req-1", 3):
            logger.warning("stage %d", 7)
            with request_scope("req-2"):
                logger.info("inner")
        logger.info("request again")
    logger.info("outside again")
    lines = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]
    assert lines == [
        "INFO omnistage.engine.test request_id=- stage=- outside",
        "INFO omnistage.engine.test request_id=req-1 stage=- request",
        "WARNING omnistage.engine.test request_id=req-1 stage=3 stage 7",
        "INFO omnistage.engine.test request_id=req-2 stage=3 inner",
        "INFO omnistage.engine.test request_id=req-1 stage=- request again",
        "INFO omnistage.engine.test request_id=- stage=- outside again",
    ]


@pytest.mark.invariant("OBS-INV-001")
async def test_tasks_and_threads_have_scopes_of_their_own(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    logger = get_logger(__name__)
    barrier = threading.Barrier(2, timeout=30)

    async def in_task(request_id: str) -> None:
        with request_scope(request_id):
            await asyncio.sleep(0)
            logger.info("task of %s", request_id)

    def in_thread(request_id: str) -> None:
        with request_scope(request_id, 1):
            barrier.wait()
            logger.info("thread of %s", request_id)

    await asyncio.gather(*(in_task(f"a{n}") for n in range(5)))
    threads = [threading.Thread(target=in_thread, args=(f"b{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 7
    for line in lines:
        assert f"request_id={line.split()[-1]} " in line


def test_the_scope_ends_when_its_body_fails(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    with contextlib.suppress(KeyError), request_scope("r", 1):
        raise KeyError
    get_logger("x").info("after")
    assert "request_id=- stage=- after" in stream.getvalue()


def test_json_lines_have_the_same_facts(stream: io.StringIO) -> None:
    configure_logging(json=True, stream=stream)
    try:
        raise ValueError("inner\nmatter")
    except ValueError:
        with request_scope("r", 2):
            get_logger("x").exception("line\nbreak")
    get_logger("x").info("plain")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["request_id"], first["stage"], first["level"]) == ("r", 2, "error")
    assert first["message"] == "line\nbreak"
    assert "ValueError: inner" in first["exception"]
    assert (second["request_id"], second["stage"], second["logger"]) == (None, None, "omnistage.x")
    assert second["time"].endswith("Z")


def test_nobody_can_forge_a_line(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    with request_scope("r\n2030-01-01T00:00:00.000Z INFO omnistage request_id=x"):
        get_logger("x").info("got %s", "a\r\nfake\x1b[31m\u2028more")
    first, *others = stream.getvalue().splitlines()
    assert "omnistage.x request_id=r" in first
    assert others
    assert all(line.startswith("  | ") for line in others)
    assert "\x1b" not in stream.getvalue()


def test_configuring_twice_replaces_and_touches_nobody_else(stream: io.StringIO) -> None:
    root, other = logging.getLogger(), logging.getLogger("uvicorn")
    before = (list(root.handlers), root.level, list(other.handlers), other.level)
    foreign = logging.NullHandler()
    logging.getLogger("omnistage").addHandler(foreign)
    first = io.StringIO()
    configure_logging("error", stream=first)
    configure_logging("DEBUG", stream=stream)
    get_logger("x").debug("once")
    assert first.getvalue() == ""
    assert len(stream.getvalue().splitlines()) == 1
    handlers = logging.getLogger("omnistage").handlers
    assert foreign in handlers
    assert len([h for h in handlers if isinstance(h, OmniHandler)]) == 1
    assert before == (list(root.handlers), root.level, list(other.handlers), other.level)


def test_the_level_decides_what_is_written(stream: io.StringIO) -> None:
    configure_logging("warning", stream=stream)
    get_logger("x").info("no")
    get_logger("x").warning("yes")
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["yes"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'loud'; allowed: debug, info, warning"):
        configure_logging("loud")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("omnistage", "omnistage"),
        ("omnistage.api", "omnistage.api"),
        ("api", "omnistage.api"),
        ("omnistagex", "omnistage.omnistagex"),
    ],
)
def test_loggers_live_below_omnistage(name: str, expected: str) -> None:
    assert get_logger(name).name == expected


def logged_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every variable or attribute that a logging call prints."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if node.func.attr not in LOG_CALLS or not (
            isinstance(owner, ast.Name) and "log" in owner.id
        ):
            continue
        for argument in node.args:
            is_length = isinstance(argument, ast.Call) and getattr(argument.func, "id", "") == "len"
            for inner in () if is_length else ast.walk(argument):
                name = getattr(inner, "attr", getattr(inner, "id", None))
                if isinstance(name, str):
                    yield node.lineno, name


def test_the_search_for_logged_content_finds_it() -> None:
    source = "logger.info('%s %d', request.prompt, len(body))\naccess_log.debug(f'{text}')\n"
    assert {name for _, name in logged_names(source)} & USER_CONTENT == {"prompt", "text"}


@pytest.mark.invariant("OBS-INV-004")
def test_no_log_call_prints_user_content() -> None:
    for path in Path(omnistage.__path__[0]).rglob("*.py"):
        for line, name in logged_names(path.read_text()):
            assert name not in USER_CONTENT, f"{path}:{line} logs {name}"
