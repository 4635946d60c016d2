"""The token executor where the scheduler's driver has its fake one: late work is done at once."""

from __future__ import annotations

from typing import Any

from omnistage.ar.executor import TokenExecutor
from omnistage.ar.options import read_token_options
from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import OmniError, as_omni_error
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from tests.ar.driver import Driver
from tests.ar.hand_plans import Lanes

Late = tuple[RequestIdentity, StageData | OmniError]


class RealExecutor:
    """`steps` counts the plans it was given, and `preempted` those rows that start over."""

    def __init__(self, stage: ResolvedStage, *, lag: int) -> None:
        self.inner = TokenExecutor(stage, 0, 1, lag=lag)
        self.description = self.inner.load(lambda note, fraction: None)
        self.late: list[Late] = []
        self.restarts = 0
        self.widest = 0

    @property
    def rows(self) -> list[Any]:
        return list(self.inner.held_sequences())

    def execute(self, command: Command) -> StageData:
        plan = command.data.fields.get("plan")
        if plan is not None:
            self.restarts += sum(row.restart is not None for row in plan.rows)
            self.widest = max(self.widest, len(plan.rows))
        lanes = Lanes()
        result = self.inner.execute(command, lanes)
        for identity, work, _ in lanes.late:
            try:
                self.late.append((identity, work()))
            except Exception as error:
                self.late.append((identity, as_omni_error(error)))
        return result

    def release(self, key: RequestKey) -> None:
        self.inner.release(key)


def real_driver(stage: ResolvedStage, *, lag: int = 0) -> Driver:
    executor = RealExecutor(stage, lag=lag)
    return Driver(read_token_options(stage), executor)  # type: ignore[arg-type]
