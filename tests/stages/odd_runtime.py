"""The toy's runtime with the faults that only a replica's own tests need."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, LoadReporter
from omnistage.contracts.sampling import SamplingParams
from tests.toy.runtime import ToyExecutor, ToyScheduler

gate = threading.Event()
"""What gated work waits for; the tests of one process run one after the other."""


at_gate = threading.Event()
"""That somebody waits there, or did."""


def wait_at_gate() -> None:
    at_gate.set()
    assert gate.wait(20), "nobody opened the gate"


class OddScheduler(ToyScheduler):
    def stats(self) -> dict[str, float]:
        return {"preemptions": 3}

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        for emission in super().complete(command, results):
            if emission.data is not None and emission.data.fields.get("fault") == "unsendable":
                emission.data.fields = {"secret": object()}
            yield emission


class OddExecutor(ToyExecutor):
    def load(self, report: LoadReporter) -> dict[str, Any]:
        if self._load_error == "exit":
            raise SystemExit("a library calls exit")
        if self._load_error == "gated":
            self._load_error = None
            report("at the gate", 0.0)
            wait_at_gate()
        return super().load(report)

    def _misbehave(self, piece: dict[str, Any]) -> None:
        match piece.get("fault"):
            case "exit":
                raise SystemExit("a library calls exit")
            case "gated":
                wait_at_gate()
            case "unsendable":
                pass
            case _:
                super()._misbehave(piece)

    def control(self, method: str, arguments: dict[str, Any]) -> Any:
        return object() if method == "unsendable" else super().control(method, arguments)

    def close(self) -> None:
        super().close()
        if self._load_error == "exit":
            raise RuntimeError("and it cannot be closed")


class RefusingRuntime:
    """Its executors cannot even be made, except the leader's."""

    scheduler = OddScheduler

    @staticmethod
    def executor(stage: ResolvedStage, rank: int, world_size: int) -> OddExecutor:
        if rank > 0:
            raise UnsupportedCombinationError(f"no rank {rank} here")
        return OddExecutor(stage, rank, world_size)


class OddRuntime:
    scheduler = OddScheduler
    executor = OddExecutor


def gated_adapter(data: StageData, params: SamplingParams, executor: OddExecutor) -> StageData:
    wait_at_gate()
    return data
