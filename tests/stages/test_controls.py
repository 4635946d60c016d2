"""Whom a call to a replica reaches: its scheduler, where that names it, else its executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omnistage.stages.controls import ReplicaControls


class Executor:
    def control(self, method: str, arguments: dict[str, Any]) -> Any:
        return ("executor", method, arguments)


class Plain:
    """A scheduler without calls of its own."""


class Counting:
    def controls(self) -> Mapping[str, Callable[..., Any]]:
        return {"token_stats": lambda: {"running": 2}, "forget": lambda name: name}


def controls(scheduler: Any, drained: list[bool]) -> ReplicaControls:
    return ReplicaControls("a stage", 0, Executor(), scheduler, dict, lambda: drained.append(True))  # type: ignore[arg-type]


def test_the_scheduler_answers_what_it_names_without_waiting_for_outputs() -> None:
    drained: list[bool] = []
    calls = controls(Counting(), drained)
    assert calls.call("token_stats", {}) == {"running": 2}
    assert calls.call("forget", {"name": "x"}) == "x"
    assert not drained
    assert calls.call("tokenize", {"text": "a"}) == ("executor", "tokenize", {"text": "a"})
    assert drained


def test_without_calls_of_its_own_the_executor_answers() -> None:
    assert controls(Plain(), []).call("token_stats", {})[0] == "executor"
