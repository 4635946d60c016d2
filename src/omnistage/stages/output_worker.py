"""Late outputs: a replica's second thread finishes outputs while its first runs the next command.

The work comes from `ExecutionContext.finish_later`; what becomes of it goes back to the executing
thread, in the order in which the work was given.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from omnistage.contracts.errors import InternalError, OmniError, StageLostError, as_omni_error
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import INPUT_LANE, OUTPUT_LANE
from omnistage.observability.logging import get_logger, request_scope

logger = get_logger(__name__)

CAPACITY = 16
_DOING = {OUTPUT_LANE: "finishing an output", INPUT_LANE: "making an input ready"}
LIMIT_KINDS = {OUTPUT_LANE: "output", INPUT_LANE: "encode"}
"""The operation whose limit a work has, by lane."""
Work = Callable[[], StageData]


@dataclass(slots=True, eq=False)
class LateOutput:
    """One work of a lane. `given_s` is a monotonic time; `withdrawn`: nobody waits for it."""

    identity: RequestIdentity
    work: Work | None
    given_s: float
    lane: str = OUTPUT_LANE
    outcome: StageData | OmniError | None = None
    withdrawn: bool = False

    def withdraw(self) -> None:
        self.withdrawn = True
        self.work = self.outcome = None


class OutputWorker:
    """One output thread and one that watches it; both start with the first work.

    At most `capacity` works wait. `on_outcome` gets each work that has run, `on_stall` the error of
    a replica whose work has run for more than `limit_s` seconds, once; neither may block.
    """

    def __init__(
        self,
        stage_name: str,
        stage_id: int,
        replica_id: int,
        *,
        limit_s: float,
        on_outcome: Callable[[LateOutput], None],
        on_stall: Callable[[StageLostError], None],
        capacity: int = CAPACITY,
        lane: str = OUTPUT_LANE,
    ) -> None:
        self._lane = lane
        self._stage_name = stage_name
        self._stage_id = stage_id
        self._limit_s = limit_s
        self._on_outcome = on_outcome
        self._on_stall = on_stall
        self._capacity = capacity
        self._changed = threading.Condition()
        self._waiting: deque[LateOutput] = deque()
        self._running: LateOutput | None = None
        self._running_since_s = 0.0
        self._undelivered: deque[LateOutput] = deque()
        self._ending = False
        self._stalled = False
        name = f"{lane}-{stage_id}-{replica_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)

    # executing thread -------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Works that wait or run, and outcomes that nobody has taken yet."""
        with self._changed:
            return len(list(self._pending()))

    def submit(self, identity: RequestIdentity, work: Work) -> LateOutput:
        """Queue `work`; waits while the queue is full. It is withdrawn at once when this replica
        ends. Raises `StageLostError` when no place becomes free."""
        late = LateOutput(identity, work, time.monotonic(), self._lane)
        with self._changed:
            self._start_threads()
            self._changed.wait_for(
                lambda: self._is_over or len(self._waiting) < self._capacity, 2 * self._limit_s
            )
            if self._is_over:
                late.withdraw()
            elif len(self._waiting) >= self._capacity:
                raise self._lost()
            else:
                self._waiting.append(late)
                self._changed.notify_all()
        return late

    def take(self, late: LateOutput) -> StageData | OmniError | None:
        """The outcome of a work that is done; None when it was withdrawn meanwhile."""
        with self._changed:
            if late.withdrawn:
                return None
            self._undelivered.remove(late)
            return late.outcome

    def withdraw(self, key: RequestKey) -> None:
        """Let go of all that is pending for one child. What runs is let go of when it is done."""
        with self._changed:
            self._withdraw([late for late in self._pending() if late.identity.key == key])

    def withdraw_each(self, lates: Iterable[LateOutput]) -> None:
        with self._changed:
            self._withdraw(list(lates))

    def drain(self, limit_s: float) -> bool:
        """Wait until no work waits or runs. False, and a line in the log that says what is stuck,
        when that takes more than `limit_s` seconds or the output thread is stalled."""
        with self._changed:
            self._changed.wait_for(lambda: self._stalled or self._is_idle, limit_s)
            if self._is_idle:
                return True
        where = self.diagnostics()
        logger.error("%ss are still unfinished after %.1f s\n%s", self._lane, limit_s, where)
        return False

    def close(self, limit_s: float) -> None:
        """Withdraw what has not begun, wait for what runs, end the threads. Idempotent."""
        self.end_waits()
        give_up_s = time.monotonic() + limit_s
        with self._changed:
            self._withdraw(list(self._waiting))
        finished = self.drain(limit_s)
        for thread in (self._thread, self._watcher):
            if finished and thread.ident is not None:
                thread.join(max(0.0, give_up_s - time.monotonic()))

    # any thread -------------------------------------------------------------------------------

    def end_waits(self) -> None:
        """This replica ends: no new work is taken, a `submit` that waits returns."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def diagnostics(self) -> str:
        """Which children are pending since when, and where the output thread is."""
        now_s = time.monotonic()
        with self._changed:
            running, since_s = self._running, self._running_since_s
            lines = [f"late {self._lane}s of stage {self._stage_name!r}:"]
            for late in self._pending():
                state = "not begun"
                if late is running:
                    state = f"running for {now_s - since_s:.1f} s"
                elif late in self._undelivered:
                    state = "done, not delivered"
                lines.append(f"  {late.identity}: given {now_s - late.given_s:.1f} s ago, {state}")
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.format_stack(frame) if frame is not None else ["  it does not run\n"]
        return "\n".join(
            [*lines, f"the {self._lane} thread's stack:", *"".join(stack).splitlines()]
        )

    # output thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """False when there will be no more. Keeps no reference to what it has finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)  # `close` ends it.
            if not self._waiting:
                return False
            late = self._running = self._waiting.popleft()
            self._running_since_s = time.monotonic()
            work, late.work = late.work, None
            self._changed.notify_all()
        assert work is not None
        outcome = self._outcome_of(late.identity, work)
        del work
        with self._changed:
            self._running = None
            if not late.withdrawn:
                late.outcome = outcome
                self._undelivered.append(late)
            self._on_outcome(late)  # Withdrawn or not: a replica that drains waits for this.
            self._changed.notify_all()
        return True

    def _outcome_of(self, identity: RequestIdentity, work: Work) -> StageData | OmniError:
        with request_scope(str(identity), self._stage_id):
            try:
                return work()
            except BaseException as error:
                failure = as_omni_error(error, detail=traceback.format_exc())
                if isinstance(failure, InternalError):
                    logger.error("%s failed: %s", _DOING[self._lane], failure.detail)
        failure.__cause__ = failure.__context__ = None
        return failure.with_traceback(None)  # Frames would keep what the work was about.

    # watching thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        """Sleeps until the work that runs now would be overdue."""
        with self._changed:
            while not self._ending:
                rest_s = None
                if self._running is not None:
                    rest_s = self._running_since_s + self._limit_s - time.monotonic()
                if rest_s is not None and rest_s <= 0:
                    break
                self._changed.wait(rest_s)
            if self._ending:
                return
            self._stalled = True
            error = self._lost()
            self._changed.notify_all()
        error.detail = self.diagnostics()
        logger.error("%s\n%s", error, error.detail)
        self._on_stall(error)

    # with the lock held -----------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._ending or self._stalled

    @property
    def _is_idle(self) -> bool:
        return self._running is None and not self._waiting

    def _pending(self) -> Iterator[LateOutput]:
        yield from self._undelivered
        if self._running is not None:
            yield self._running
        yield from self._waiting

    def _withdraw(self, lates: list[LateOutput]) -> None:
        for late in lates:
            late.withdraw()
        self._waiting = deque(late for late in self._waiting if not late.withdrawn)
        self._undelivered = deque(late for late in self._undelivered if not late.withdrawn)
        self._changed.notify_all()

    def _start_threads(self) -> None:
        if self._thread.ident is None and not self._is_over:
            self._thread.start()
            self._watcher.start()

    def _lost(self) -> StageLostError:
        return StageLostError(
            f"stage {self._stage_name!r} hung: {_DOING[self._lane]} takes longer than "
            f"{self._limit_s:g} s, the limit of operation {LIMIT_KINDS[self._lane]!r}; please retry"
        )
