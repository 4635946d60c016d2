"""A token stage's scheduler and executor in this thread: a replica's loop without its messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

MANY_CREDITS = 1 << 30


class Context:
    """An `ExecutionContext` that does late work at once, before the next command."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.late: list[tuple[Any, Callable[[], Any]]] = []

    def checkpoint(self) -> frozenset[Any]:
        return frozenset()

    def progress(self, identity: Any, step: int, total_steps: int) -> None:
        pass

    def operation(self, kind: str) -> None:
        pass

    def finish_later(self, identity: Any, work: Callable[[], Any], *, lane: str = "output") -> None:
        self.late.append((identity, work))


class TokenLoop:
    def __init__(self, stage: Any) -> None:
        from omnistage.ar.executor import TokenExecutor
        from omnistage.ar.runtime import TokenRuntime

        self.scheduler = TokenRuntime.scheduler(stage)
        self.executor = TokenExecutor(stage, 0, 1)
        self.description = self.executor.load(lambda note, fraction: None)
        self.context = Context()
        self.tokens: dict[str, int] = {}
        self.generated: dict[str, list[int]] = {}
        self.finished_s: dict[str, float] = {}
        self.emissions: list[Any] = []

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        from omnistage.contracts.identity import RequestIdentity
        from omnistage.contracts.modalities import Modality
        from omnistage.contracts.payloads import StageData
        from omnistage.contracts.runtime import StageRequest
        from omnistage.contracts.sampling import OmniTokenSamplingParams

        identity = RequestIdentity(request_id=name)
        self.tokens[name] = 0
        request = StageRequest(
            identity=identity,
            data=StageData(modality=Modality.TOKENS, fields={"prompt_token_ids": prompt}),
            params=OmniTokenSamplingParams(**params),
        )
        self.scheduler.set_credits(identity.key, MANY_CREDITS)
        self.scheduler.add(request)
        self.scheduler.set_credits(identity.key, MANY_CREDITS)

    def turn(self) -> str | None:
        """One command: its name, None when there is nothing to do."""
        late, self.context.late = self.context.late, []
        for identity, work in late:
            self._take(self.scheduler.deliver(identity, work()))
        command = self.scheduler.next_command()
        if command is None:
            return None if not self.context.late else "late"
        result = self.executor.execute(command, self.context)
        self._take(self.scheduler.complete(command, [result]))
        return command.name

    def run(self) -> None:
        while self.turn() is not None:
            pass

    def _take(self, emissions: Any) -> None:
        for emission in emissions:
            name = emission.identity.request_id
            if emission.error is not None:
                raise RuntimeError(f"{name}: {emission.error}")
            token_ids = emission.data.fields["token_ids"]
            self.tokens[name] += len(token_ids)
            self.generated.setdefault(name, []).extend(token_ids)
            if emission.final:
                self.finished_s[name] = time.perf_counter()
                self.executor.release(emission.identity.key)
