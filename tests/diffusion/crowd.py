"""Many requests on one real runtime: joins, aborts, cancels and failures at given times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from omnistage.contracts.errors import OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, StageRequest
from tests.diffusion.concurrent import Concurrent, Outcome

MAX_COMMANDS = 1000


@dataclass
class CancellingContext:
    """Says at every checkpoint that `cancelled` are."""

    cancelled: set[RequestKey]
    steps: list[str] = field(default_factory=list)
    rank: int = 0
    world_size: int = 1

    def checkpoint(self) -> frozenset[RequestKey]:
        return frozenset(self.cancelled)

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        assert 0 <= step <= total_steps
        self.steps.append(identity.request_id)

    def operation(self, kind: str) -> None:
        """Nobody watches."""

    def finish_later(self, identity: RequestIdentity, work: Callable[[], StageData]) -> None:
        raise AssertionError("nothing is finished later on a CPU")


class Crowd:
    """One runtime; `run` may be called again and again."""

    def __init__(self, name: str, **changes: Any) -> None:
        self._runtime = Concurrent(name, **changes)
        self.scheduler = self._runtime._driver.scheduler
        self.executor = self._runtime.executor

    @property
    def family(self) -> Any:
        return self._runtime.family

    @property
    def steps(self) -> Any:
        return self.executor._steps

    def state(self, name: str) -> Any:
        return self.steps._states[name, 0]

    def run(
        self,
        requests: Mapping[str, StageRequest],
        *,
        joins_at: Mapping[str, int] | None = None,
        aborts_at: Mapping[str, int] | None = None,
        cancels_at: Mapping[str, int] | None = None,
        before: Callable[[Command], None] | None = None,
    ) -> Outcome:
        """Run all to their ends. Times are numbers of commands. An abort comes between commands; a
        cancel is seen by the command that begins then and followed by its abort."""
        outcome = Outcome()
        waiting = {name: (joins_at or {}).get(name, 0) for name in requests}
        aborts, cancels = dict(aborts_at or {}), dict(cancels_at or {})
        for number in range(MAX_COMMANDS):
            for name in [name for name, at in waiting.items() if at <= number]:
                self.scheduler.add(requests[name])
                del waiting[name]
            for name in [name for name, at in aborts.items() if at <= number]:
                self._abort(name, waiting, aborts)
            command = self.scheduler.next_command()
            if command is None and not waiting:
                break
            if command is None:
                continue
            if before is not None:
                before(command)
            seen = {name for name, at in cancels.items() if at <= number}
            self._carry_out(command, seen, outcome)
            for name in seen:
                self._abort(name, waiting, cancels)
        assert self.scheduler.counts() == (0, 0)
        return outcome

    def alone(self, request: StageRequest) -> StageData:
        name = request.identity.request_id
        return self.run({name: request}).results[name]

    def _abort(self, name: str, waiting: dict[str, int], planned: dict[str, int]) -> None:
        waiting.pop(name, None)
        planned.pop(name)
        self.scheduler.abort((name, 0))
        self.executor.release((name, 0))

    def _carry_out(self, command: Command, cancelled: set[str], outcome: Outcome) -> None:
        members = tuple(identity.request_id for identity in command.identities)
        outcome.commands.append((command.name, members))
        context = CancellingContext({(name, 0) for name in cancelled})
        try:
            result = self.executor.execute(command, context)
        except OmniError as error:
            emissions = list(self.scheduler.fail(command, error))
        else:
            emissions = list(self.scheduler.complete(command, [result]))
        assert not cancelled & set(context.steps), "a cancelled request took a step"
        for emission in emissions:
            if emission.identity.request_id not in cancelled:
                outcome.take(emission)
            if emission.final:
                self.executor.release(emission.identity.key)


@contextmanager
def replaced(target: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`target.name` is what `make` makes of it, for a while."""
    original = getattr(target, name)
    setattr(target, name, make(original))
    try:
        yield
    finally:
        delattr(target, name)
        if getattr(target, name, None) != original:
            setattr(target, name, original)


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def max_difference(one: StageData, other: StageData) -> float:
    first, second = (torch.as_tensor(data.tensors["images"]) for data in (one, other))
    return float((first.double() - second.double()).abs().max())
