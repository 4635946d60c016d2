"""A replica's loop around a token scheduler and a fake executor, without threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from omnistage.ar.options import TokenOptions, read_token_options
from omnistage.ar.scheduler import TokenScheduler
from omnistage.contracts.errors import OmniError, as_omni_error
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Emission, StageRequest
from omnistage.contracts.sampling import OmniTokenSamplingParams
from tests.ar.fake_executor import FakeDetokenizer, FakeExecutor, FakeGrammar
from tests.config.pipelines import resolve, token_pipeline

MANY_CREDITS = 1_000_000


def token_options(**changes: Any) -> TokenOptions:
    """Those of a stage with 8 places and all else left open, changed."""
    config = resolve(token_pipeline(), max_num_seqs=8, options={"token_model": "a:b"})
    return replace(read_token_options(config.stages[0]), **changes)


@dataclass
class Heard:
    """What a child has emitted."""

    emissions: list[Emission] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [i for one in self.emissions if one.data for i in one.data.fields["token_ids"]]

    @property
    def text(self) -> str:
        return "".join(one.data.fields["text"] for one in self.emissions if one.data)

    @property
    def error(self) -> OmniError | None:
        return self.emissions[-1].error if self.emissions else None

    @property
    def ended(self) -> bool:
        last = self.emissions[-1] if self.emissions else None
        return last is not None and (last.final or last.error is not None)

    @property
    def finish_reason(self) -> str | None:
        return self.emissions[-1].finish_reason

    @property
    def last(self) -> dict[str, Any]:
        data = self.emissions[-1].data
        assert data is not None
        return data.fields


class Driver:
    def __init__(
        self,
        options: TokenOptions | None = None,
        executor: FakeExecutor | None = None,
        *,
        hold_late: bool = False,
        make_grammar: Any = None,
    ) -> None:
        self.executor = executor or FakeExecutor()
        self.scheduler = TokenScheduler(
            options or token_options(),
            make_detokenizer=FakeDetokenizer,
            make_grammar=make_grammar or FakeGrammar,
            token_bytes=lambda tokenizer, one: tokenizer.decode([one]).encode(),
        )
        self.hold_late = hold_late
        self.heard: dict[RequestKey, Heard] = {}
        self.credits: dict[RequestKey, int] = {}

    def add(
        self,
        name: str,
        prompt: Iterable[int] = (1, 2, 3),
        *,
        credits: int = MANY_CREDITS,
        priority: int = 0,
        input_complete: bool = True,
        fields: dict[str, Any] | None = None,
        **params: Any,
    ) -> Heard:
        identity = RequestIdentity(request_id=name, priority=priority)
        heard = self.heard[identity.key] = Heard()
        self.credits[identity.key] = credits
        self.scheduler.set_credits(identity.key, credits)
        request = StageRequest(
            identity=identity,
            data=StageData(
                modality=Modality.TOKENS,
                fields={"prompt_token_ids": list(prompt), **(fields or {})},
            ),
            params=OmniTokenSamplingParams(**params),
            input_complete=input_complete,
        )
        self.scheduler.add(request)
        self.scheduler.set_credits(identity.key, credits)
        return heard

    def abort(self, name: str) -> None:
        self.scheduler.abort((name, 0))
        self.executor.release((name, 0))
        self.heard.pop((name, 0), None)

    def acknowledge(self, name: str, count: int = 1) -> None:
        self.credits[name, 0] += count
        self.scheduler.set_credits((name, 0), self.credits[name, 0])

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        if not self.hold_late:
            self.deliver_late()
        command = self.scheduler.next_command()
        if command is None:
            return False
        try:
            result = self.executor.execute(command)
        except (OmniError, RuntimeError) as error:
            self._take(self.scheduler.fail(command, as_omni_error(error)))
        else:
            self._take(self.scheduler.complete(command, [result]))
        return True

    def deliver_late(self) -> None:
        late, self.executor.late = self.executor.late, []
        for identity, outcome in late:
            if identity.key in self.heard and not self.heard[identity.key].ended:
                self._take(self.scheduler.deliver(identity, outcome))

    def run(self, limit: int = 10_000) -> None:
        """Until there is nothing to do."""
        for _ in range(limit):
            if not self.step() and not self.executor.late:
                return
        raise AssertionError(f"still busy after {limit} turns: a livelock")

    def _take(self, emissions: Iterable[Emission]) -> None:
        for emission in list(emissions):
            key = emission.identity.key
            heard = self.heard[key]
            assert not heard.ended, f"an emission for {key} after its end"
            heard.emissions.append(emission)
            if emission.error is None:
                assert self.credits[key] > 0, f"an output of {key} without credits"
                self.credits[key] -= 1
                if not emission.final:
                    self.scheduler.set_credits(key, self.credits[key])
            if heard.ended:
                self.executor.release(key)

    def assert_nothing_held(self) -> None:
        stats = self.scheduler.stats()
        assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
        assert not self.executor.rows
