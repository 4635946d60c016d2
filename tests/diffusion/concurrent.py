"""Several requests in one runtime, which join at given times, without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omnistage.contracts.errors import OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest
from omnistage.models.registry import find_pipeline
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver

MAX_COMMANDS = 500


@dataclass
class ManyContext:
    """Notes the progress of each request; nothing is cancelled."""

    steps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1

    def checkpoint(self) -> frozenset[RequestKey]:
        return frozenset()

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        self.steps.setdefault(identity.request_id, []).append((step, total_steps))

    def operation(self, kind: str) -> None:
        """Nobody watches."""

    def finish_later(self, identity: RequestIdentity, work: Callable[[], StageData]) -> None:
        raise AssertionError("nothing is finished later on a CPU")


@dataclass
class Outcome:
    """What came of one run: final results and previews by request, and the commands in order."""

    results: dict[str, StageData] = field(default_factory=dict)
    errors: dict[str, OmniError] = field(default_factory=dict)
    previews: dict[str, list[StageData]] = field(default_factory=dict)
    commands: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    steps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def waves(self, name: str) -> list[tuple[str, ...]]:
        return [members for command, members in self.commands if command == name]

    def take(self, emission: Emission) -> None:
        request_id = emission.identity.request_id
        if emission.error is not None:
            self.errors[request_id] = emission.error
        elif emission.final:
            self.results[request_id] = emission.data
        else:
            self.previews.setdefault(request_id, []).append(emission.data)


class Concurrent:
    """A leader and its one rank, with the options that the registry gives the checkpoint."""

    def __init__(
        self, name: str, *, options: Mapping[str, Any] | None = None, **stage: Any
    ) -> None:
        folder = checkpoint(name)
        declared = find_pipeline(str(folder)).pipeline.options.get(0, {})
        self._driver = Driver(folder, options={**declared, **(options or {})}, **stage)

    @property
    def executor(self) -> Any:
        return self._driver.executor

    @property
    def family(self) -> Any:
        return self._driver.executor._fast_path.family

    def run(
        self,
        requests: Mapping[str, StageRequest],
        joins_at: Mapping[str, int] | None = None,
        before: Callable[[Command], None] | None = None,
    ) -> Outcome:
        """Run all to their ends. A request joins before command number `joins_at` (0)."""
        scheduler, outcome, context = self._driver.scheduler, Outcome(), ManyContext()
        waiting = {name: (joins_at or {}).get(name, 0) for name in requests}
        for number in range(MAX_COMMANDS):
            for name in [name for name, at in waiting.items() if at <= number]:
                scheduler.add(requests[name])
                del waiting[name]
            command = scheduler.next_command()
            if command is None:
                if not waiting:
                    break
                continue
            if before is not None:
                before(command)
            self._carry_out(command, context, outcome)
        assert scheduler.counts() == (0, 0)
        outcome.steps = context.steps
        return outcome

    def _carry_out(self, command: Command, context: ManyContext, outcome: Outcome) -> None:
        scheduler = self._driver.scheduler
        members = tuple(identity.request_id for identity in command.identities)
        outcome.commands.append((command.name, members))
        try:
            emissions = scheduler.complete(command, [self.executor.execute(command, context)])
        except OmniError as error:
            emissions = scheduler.fail(command, error)
        for emission in emissions:
            outcome.take(emission)
            if emission.final:
                self.executor.release(emission.identity.key)
