"""Many requests on one real runtime: joins, aborts, cancels and failures at given times."""

from __future__ import annotations

import gc
import random
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
from tests.diffusion.driver import diffusion_request

MAX_COMMANDS = 1000


@dataclass
class CancellingContext:
    """Says at every checkpoint that `cancelled` are; `late` is what outputs still need."""

    cancelled: set[RequestKey]
    late: list[tuple[RequestIdentity, Callable[[], StageData]]] = field(default_factory=list)
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
        if identity.key not in self.cancelled:
            self.late.append((identity, work))


class Crowd:
    """One runtime; `run` may be called again and again."""

    def __init__(self, name: str, **changes: Any) -> None:
        self._runtime = Concurrent(name, **changes)
        self.scheduler = self._runtime._driver.scheduler
        self.executor = self._runtime.executor
        self._late: list[tuple[RequestIdentity, Callable[[], StageData]]] = []

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
            if command is None and not waiting and not self._late:
                break
            due, self._late = self._late, []
            if command is not None:
                if before is not None:
                    before(command)
                seen = {name for name, at in cancels.items() if at <= number}
                self._carry_out(command, seen, outcome)
                for name in seen:
                    self._abort(name, waiting, cancels)
            self._deliver(due, outcome)
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
        self._late = [one for one in self._late if one[0].key != (name, 0)]

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
            self._late += context.late
        assert not cancelled & set(context.steps), "a cancelled request took a step"
        for emission in emissions:
            if emission.identity.request_id not in cancelled:
                outcome.take(emission)
            if emission.final:
                self.executor.release(emission.identity.key)

    def _deliver(
        self, due: list[tuple[RequestIdentity, Callable[[], StageData]]], outcome: Outcome
    ) -> None:
        """Outputs that were started one command ago, as the replica's output thread brings them."""
        for identity, work in due:
            try:
                finished: StageData | OmniError = work()
            except OmniError as error:
                finished = error
            for emission in self.scheduler.deliver(identity, finished):
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


def cancel_many(crowd: Crowd, count: int, seed: int) -> int:
    """Cancel 9 of 10 of `count` requests at random times. Returns how many were done."""
    drawn = random.Random(seed)
    asked, joins, cancels, aborts = {}, {}, {}, {}
    for i in range(count):
        name = f"r{i}"
        guided = drawn.random() < 0.5
        asked[name] = diffusion_request(
            "a red cat",
            negative_prompt="bad" if guided else None,
            true_cfg_scale=3.0 if guided else 1.0,
            request_id=name,
            height=32,
            width=drawn.choice((32, 48)),
            num_inference_steps=5,
            partial_images=drawn.randrange(3),
            seed=i,
        )
        joins[name] = i // 2
        if i % 10:
            where = cancels if drawn.random() < 0.5 else aborts
            where[name] = joins[name] + drawn.randrange(12)
    outcome = crowd.run(asked, joins_at=joins, cancels_at=cancels, aborts_at=aborts)
    assert outcome.errors == {}
    return len(outcome.results)


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def max_difference(one: StageData, other: StageData) -> float:
    first, second = (torch.as_tensor(data.tensors["images"]) for data in (one, other))
    return float((first.double() - second.double()).abs().max())
