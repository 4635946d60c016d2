"""A step scheduler, its fake executor, and what became of each request."""

from __future__ import annotations

from collections import defaultdict

from omnistage.contracts.errors import OmniError
from omnistage.diffusion.batching import shape_key
from omnistage.diffusion.queue import WaitingQueue
from omnistage.diffusion.step_scheduler import StepScheduler
from tests.diffusion.driver import diffusion_request
from tests.diffusion.fake_executor import FakeExecutor

COSTS = (1, 2, 3)


def make_scheduler(**settings) -> StepScheduler:
    queue = WaitingQueue(capacity=10_000, defaults={}, batch_key=shape_key, clock=lambda: 0.0)
    return StepScheduler(queue, **settings)


def request(name: str, cost: int = 1, steps: int = 2, **changes):
    return diffusion_request(
        **{"prompt": "p", **changes}, request_id=name, height=16 * cost, num_inference_steps=steps
    )


class World:
    """Emits as a replica does: never more than there are credits, nothing after the end."""

    def __init__(self, *, late: bool = False, **settings) -> None:
        self.scheduler = make_scheduler(**settings)
        self.executor = FakeExecutor(settings.get("max_num_seqs", 1), late=late)
        self.ended: dict[str, OmniError | None] = {}
        self.previews: dict[str, list] = defaultdict(list)
        self.credits: dict[str, int] = {}
        self.open: set[str] = set()

    def add(self, name: str, *args, credits: int | None = None, **changes) -> None:
        self.scheduler.add(request(name, *args, **changes))
        self.open.add(name)
        if credits is not None:
            self.give_credits(name, credits)

    def give_credits(self, name: str, number: int) -> None:
        self.credits[name] = self.credits.get(name, 0) + number
        self.scheduler.set_credits((name, 0), self.credits[name])

    def abort(self, name: str) -> None:
        self.scheduler.abort((name, 0))
        self.executor.release((name, 0))
        self.open.discard(name)

    def run(self, error: OmniError | None = None, moved=()) -> tuple[str, tuple[str, ...]] | None:
        command = self.scheduler.next_command()
        if command is None:
            return None
        if error is not None:
            self.executor.fail_halfway(command, moved)
            self._emit(self.scheduler.fail(command, error))
            return command.name, tuple(one.request_id for one in command.identities)
        self._emit(self.scheduler.complete(command, [self.executor.execute(command)]))
        return self.executor.waves[-1]

    def deliver(self, error: OmniError | None = None) -> None:
        identity, data = self.executor.pending.pop(0)
        self._emit(self.scheduler.deliver(identity, error or data))

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if self.run() is None:
                if not self.executor.pending:
                    return
                self.deliver()
        raise AssertionError("it does not come to an end")

    def _emit(self, emissions) -> None:
        for emission in emissions:
            name = emission.identity.request_id
            assert name in self.open, f"{name} ended already"
            if emission.data is not None and name in self.credits:
                assert self.credits[name] > 0, f"{name} has no credit left"
                self.credits[name] -= 1
            if emission.final:
                self.ended[name] = emission.error
                self.open.discard(name)
                self.executor.release(emission.identity.key)
            else:
                self.previews[name].append(emission.data.fields["partial_image_index"])
                if name in self.credits:
                    self.scheduler.set_credits(emission.identity.key, self.credits[name])
