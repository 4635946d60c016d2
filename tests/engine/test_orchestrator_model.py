"""Random interleavings of everything that can happen, against what must hold at every moment."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnistage.contracts.errors import OmniError, StageLostError
from omnistage.contracts.identity import RequestKey
from omnistage.contracts.messages import Abort, Acknowledge, InputConsumed
from omnistage.contracts.outputs import PARTIAL_IMAGE_INDEX
from omnistage.engine.request_state import RequestState
from omnistage.engine.session import OmniSession
from tests.engine.fake_stages import FakeEngine, FakeReplica
from tests.toy.deployment import counting, toy_config, toy_pipeline

ACTIONS = [
    *("request", "session", "append", "end", "abort", "lose", "back", "final", "progress", "fail"),
    *("preview", "preview", "read", "read", "consume", "consume", "emit", "emit", "emit", "answer"),
    *("deliver", "deliver", "deliver", "deliver", "turn", "turn", "turn", "turn", "turn"),
]
WINDOW = 3


class Model:
    """Draws what happens next, and remembers what each caller has seen."""

    def __init__(self, data: st.DataObject, engine: FakeEngine) -> None:
        self._data = data
        self._engine = engine
        self._states: list[RequestState] = []
        self._sessions: list[OmniSession] = []
        self._ended: dict[str, str] = {}
        self._over: set[str] = set()
        self._consumed: set[tuple[RequestKey, int | None, int]] = set()
        self._joins = any(s.stage.join_companions for s in engine.engine.config.stages)
        self._numbers: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        self._previews: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        self._made_previews: set[tuple[RequestKey, int]] = set()
        """(child, sequence) at the first stage."""

    def draw(self, choices: list[Any]) -> Any:
        return self._data.draw(st.sampled_from(choices)) if choices else None

    async def step(self, action: str) -> None:
        await getattr(self, f"do_{action}")()
        self.check()

    # what happens -----------------------------------------------------------------------------

    async def do_turn(self) -> None:
        """The loop runs: until then events pile up in its inbox."""
        self._engine.turn()

    async def do_request(self) -> None:
        n = self.draw([1, 1, 2])
        self._states.append(self._engine.admit(counting(1), num_children=n))

    async def do_session(self) -> None:
        state = self._engine.admit(counting(1), streaming_input=True)
        self._states.append(state)
        engine = self._engine
        self._sessions.append(OmniSession(engine.orchestrator, state, engine.engine.config))

    async def do_append(self) -> None:
        session = self.draw([s for s in self._sessions if s._state.active and not s._ended])
        if session is not None and not session._state.input_credits.locked():
            await session.append_input(counting(1))

    async def do_end(self) -> None:
        session = self.draw(self._sessions)
        if session is not None:
            session.end_input()

    async def do_read(self) -> None:
        state = self.draw([s for s in self._states if s.request_id not in self._ended])
        if state is not None and (len(state.stream) or state.stream.finished):
            await self.read(state)

    async def do_abort(self) -> None:
        state = self.draw(self._states)
        if state is not None:
            self._engine.orchestrator.abort(state.request_id)

    async def do_lose(self) -> None:
        replica = self.draw([r for r in self._engine.stages.replicas if r.handle.state == "ready"])
        if replica is not None:
            self._engine.lose(replica)

    async def do_back(self) -> None:
        self._engine.turn()  # A restart takes longer than the loop's next turn.
        for replica in self._engine.stages.replicas:
            if replica.handle.state != "ready":
                self._engine.bring_back(replica)
                return

    async def do_consume(self) -> None:
        replica = self.draw([r for r in self._engine.stages.replicas if r.unread])
        if replica is not None:
            replica.consume()

    async def do_emit(self, *, final: bool = False) -> None:
        replica = self.draw(self._engine.stages.replicas)
        child = self.draw(
            [c for c in replica.children.values() if c.can_emit and (c.complete or not final)]
        )
        if child is not None:
            replica.emit(child, final=final)

    async def do_final(self) -> None:
        await self.do_emit(final=True)

    async def do_preview(self) -> None:
        replica = self.draw(self._engine.stages.replicas)
        child = self.draw([c for c in replica.children.values() if c.can_emit])
        if child is not None:
            if replica.handle.stage.stage_id == 0:
                self._made_previews.add((child.identity.key, child.outputs))
            replica.preview(child)

    async def do_progress(self) -> None:
        replica = self.draw(self._engine.stages.replicas)
        child = self.draw([c for c in replica.children.values() if not c.ended])
        if child is not None:
            replica.progress(child)

    async def do_fail(self) -> None:
        replica = self.draw(self._engine.stages.replicas)
        child = self.draw([c for c in replica.children.values() if not c.ended])
        if child is not None and self.draw([True, False, False]):
            replica.fail(child)

    async def do_answer(self) -> None:
        replica = self.draw([r for r in self._engine.stages.replicas if r.aborts])
        if replica is not None:
            replica.answer_abort()

    async def do_deliver(self) -> None:
        replica = self.draw([r for r in self._engine.stages.replicas if r.wire])
        if replica is not None:
            self.deliver(replica)

    def deliver(self, replica: FakeReplica) -> None:
        message = replica.wire[0]
        if isinstance(message, InputConsumed):
            key = message.identity.key
            self._consumed.add((key, message.source_stage_id, message.sequence))
        self._engine.deliver(replica)

    # what must hold ---------------------------------------------------------------------------

    async def read(self, state: RequestState) -> None:
        name = state.request_id
        assert name not in self._ended, "an event after the terminal one"
        try:
            event = await state.stream.get()
        except OmniError as error:
            self._ended[name] = error.type
            return
        if event.finished:
            self._ended[name] = "finished"
        if event.progress is None and event.stage_id is not None:
            source = (name, event.child_index, event.stage_id)
            if event.is_preview:
                self._previews[source].append(event.fields[PARTIAL_IMAGE_INDEX])
            else:
                self._numbers[source].append(event.fields["number"])

    def check(self) -> None:
        sent, self._engine.stages.sent = self._engine.stages.sent, []
        for message in sent:
            if message.identity.request_id in self._over:  # type: ignore[attr-defined]
                assert isinstance(message, Abort | Acknowledge), "new work after the end"
            elif isinstance(message, Acknowledge) and message.stage_id == 0 and not self._joins:
                place = (message.identity.key, 0, message.sequence)
                made = (message.identity.key, message.sequence) in self._made_previews
                assert made or place in self._consumed, "acknowledged before it was taken"
        self._over |= {state.request_id for state in self._states if not state.active}
        assert "internal_error" not in self._ended.values(), "an assertion failed on the way"
        for numbers in self._numbers.values():
            assert numbers == list(range(len(numbers)))
        for indices in self._previews.values():
            assert indices == sorted(set(indices)), "a preview twice, or an older one later"
        for state in self._states:
            partials = sum(state.stream._unread.values())
            assert partials <= WINDOW * len(state.children) * 2

    async def settle(self) -> None:
        """Everything comes back and goes on: every request ends, and nothing is left of it."""
        for session in self._sessions:
            session.end_input()
        for _ in range(500):
            self._engine.turn()
            self.check()
            for replica in self._engine.stages.replicas:
                self._settle(replica)
            for state in self._states:
                while state.request_id not in self._ended and len(state.stream):
                    await self.read(state)
            if not len(self._engine.orchestrator.table) and not self._on_the_wire():
                break
        for state in self._states:
            while state.request_id not in self._ended:
                assert state.stream.finished, f"{state.request_id} never ended"
                await self.read(state)
        self._engine.assert_nothing_held()
        assert set(self._ended) == {state.request_id for state in self._states}

    def _settle(self, replica: FakeReplica) -> None:
        if replica.handle.state != "ready":
            self._engine.bring_back(replica)
        while replica.unread:
            replica.consume()
        while replica.aborts:
            replica.answer_abort()
        for child in [c for c in replica.children.values() if c.can_emit and c.complete]:
            replica.emit(child, final=True)
        while replica.wire:
            self.deliver(replica)

    def _on_the_wire(self) -> bool:
        return any(r.wire or r.aborts or r.unread for r in self._engine.stages.replicas)


async def run(data: st.DataObject, actions: list[str], **config: Any) -> None:
    engine = FakeEngine(toy_config(ranks=1, window=WINDOW, **config))
    model = Model(data, engine)
    try:
        for action in actions:
            await model.step(action)
        await model.settle()
    finally:
        await engine.orchestrator.close()


@pytest.mark.invariant("ORCH-INV-100")
@pytest.mark.invariant("ORCH-INV-200")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), actions=st.lists(st.sampled_from(ACTIONS), min_size=5, max_size=80))
@pytest.mark.parametrize("both_final", [False, True])
def test_whatever_happens_every_request_ends_once_and_leaves_nothing(
    both_final: bool, data: st.DataObject, actions: list[str]
) -> None:
    pipeline = toy_pipeline(both_final=both_final)
    asyncio.run(run(data, actions, replicas=2, pipeline=pipeline))


@pytest.mark.invariant("ORCH-INV-103")
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    actions=st.lists(
        st.sampled_from([a for a in ACTIONS if a not in ("emit", "session")]),
        min_size=5,
        max_size=60,
    ),
)
def test_joins_hold_under_all_interleavings(data: st.DataObject, actions: list[str]) -> None:
    asyncio.run(run(data, actions, replicas=2, pipeline=toy_pipeline(join=True)))


async def test_the_model_notices_a_leak() -> None:
    """The checks can fail: a stage that never answers an abort keeps its request."""
    engine = FakeEngine(toy_config(ranks=1))
    state = engine.admit(counting(1))
    engine.turn()
    engine.orchestrator.abort(state.request_id)
    engine.turn()
    assert any(isinstance(message, Abort) for message in engine.stages.sent)
    with pytest.raises(AssertionError):
        engine.assert_nothing_held()
    await engine.orchestrator.close()


@pytest.mark.invariant("ORCH-INV-201")
async def test_an_abort_that_nobody_confirms_is_given_up_and_repeated() -> None:
    engine = FakeEngine(toy_config(ranks=1, limits={"abort_timeout_s": 0.01}))
    first = engine.stages.replicas[0]
    state = engine.admit(counting(1))
    engine.turn()
    (child,) = first.children.values()
    engine.orchestrator.abort(state.request_id)
    engine.turn()
    assert len(first.aborts) == 1
    while len(engine.orchestrator.table):
        await asyncio.sleep(0.01)
        engine.turn()
    assert state.unconfirmed
    assert state.released.is_set()
    first.emit(child, final=False)
    engine.deliver(first)
    engine.turn()
    assert len(first.aborts) == 2, "an output of a request that is over is aborted again"
    await engine.orchestrator.close()


@pytest.mark.invariant("ORCH-INV-203")
async def test_a_stage_that_is_down_for_good_fails_those_who_wait_for_it() -> None:
    engine = FakeEngine(toy_config(ranks=1))
    second = engine.stages.replicas[1]
    engine.lose(second)
    state = engine.admit(counting(1))
    engine.turn()
    (child,) = engine.stages.replicas[0].children.values()
    engine.stages.replicas[0].emit(child, final=True)
    engine.deliver(engine.stages.replicas[0])
    engine.turn()
    assert state.active
    engine.lose(second, forever=True)
    engine.turn()
    with pytest.raises(StageLostError):
        await state.stream.get()
    await engine.orchestrator.close()


@pytest.mark.invariant("ORCH-INV-105")
async def test_input_that_ends_before_any_replica_is_there_is_ended() -> None:
    engine = FakeEngine(toy_config(ranks=1))
    first = engine.stages.replicas[0]
    engine.lose(first)
    engine.turn()
    state = engine.admit(counting(1), streaming_input=True)
    session = OmniSession(engine.orchestrator, state, engine.engine.config)
    session.end_input()
    engine.turn()
    engine.bring_back(first)
    engine.turn()
    assert [child.complete for child in first.children.values()] == [True]
    await engine.orchestrator.close()


@pytest.mark.invariant("ORCH-INV-105")
async def test_input_is_bounded_by_the_slowest_of_all_who_read_it() -> None:
    engine = FakeEngine(toy_config(ranks=1, window=2))
    state = engine.admit(counting(1), streaming_input=True, num_children=2)
    session = OmniSession(engine.orchestrator, state, engine.engine.config)
    first = engine.stages.replicas[0]
    for _ in range(2):
        await session.append_input(counting(1))
    third = asyncio.create_task(session.append_input(counting(1)))
    engine.turn()
    for _ in range(3):  # Both children's first inputs, and one child's first piece.
        first.consume()
        engine.deliver(first)
        engine.turn()
    await asyncio.sleep(0)
    assert not third.done()
    first.consume()
    engine.deliver(first)
    engine.turn()
    await asyncio.wait_for(third, 10)
    await engine.orchestrator.close()


@pytest.mark.invariant("ORCH-INV-105")
async def test_whoever_waits_to_append_learns_of_the_end() -> None:
    engine = FakeEngine(toy_config(ranks=1, window=1))
    state = engine.admit(counting(1), streaming_input=True)
    session = OmniSession(engine.orchestrator, state, engine.engine.config)
    await session.append_input(counting(1))
    waiting = [asyncio.create_task(session.append_input(counting(1))) for _ in range(3)]
    engine.turn()
    await asyncio.sleep(0)
    engine.orchestrator.abort(state.request_id)
    engine.turn()
    done = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert [getattr(error, "type", error) for error in done] == ["cancelled"] * 3
    await engine.orchestrator.close()
