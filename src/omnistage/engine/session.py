"""A request whose input streams in while its output streams out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import DeadlineExceededError, InvalidRequestError, OmniError
from omnistage.contracts.outputs import OmniRequestOutput
from omnistage.contracts.payloads import StageData
from omnistage.contracts.requests import PromptLike
from omnistage.engine.orchestrator import Orchestrator
from omnistage.engine.prompts import prompt_data
from omnistage.engine.request_state import RequestState
from omnistage.engine.results import materialize


class OmniSession:
    """`append_input` waits while the entry stage has not taken earlier pieces, so a fast producer
    cannot fill memory. Iterate to read; `abort` or leaving the iteration cancels."""

    def __init__(self, orchestrator: Orchestrator, state: RequestState, config: OmniConfig) -> None:
        self._orchestrator = orchestrator
        self._state = state
        self._timeout_s = config.limits.request_timeout_s
        self._ended = False
        self._epoch = 0
        state.input_credits = asyncio.Semaphore(config.stages[0].output_window)

    @property
    def request_id(self) -> str:
        return self._state.request_id

    async def append_input(self, data: PromptLike | StageData, *, epoch: int = 0) -> None:
        """Add a piece of input. `epoch` grows when earlier pieces are superseded (barge-in).

        Raises `InvalidRequestError` after `end_input`, the request's own error once it has failed,
        and `DeadlineExceededError` when the stage takes nothing for the request's time limit.
        """
        self._check_open()
        assert self._state.input_credits is not None
        try:
            await asyncio.wait_for(self._state.input_credits.acquire(), self._timeout_s)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the entry stage took no input for {self._timeout_s:g} s"
            ) from None
        try:
            self._check_open()
            piece = data if isinstance(data, StageData) else prompt_data(data)
        except OmniError:
            self._state.return_input_credit()  # The next one that waits must learn it too.
            raise
        self._epoch = max(self._epoch, epoch)
        self._orchestrator.append_input(self._state, piece, epoch)

    def end_input(self, *, epoch: int | None = None) -> None:
        """No further input follows; `epoch` None is the newest one. Idempotent."""
        if not self._ended:
            self._ended = True
            self._orchestrator.end_input(self._state, self._epoch if epoch is None else epoch)
            self._state.return_input_credit()

    def abort(self) -> None:
        self._orchestrator.abort(self.request_id)

    async def __aiter__(self) -> AsyncIterator[OmniRequestOutput]:
        try:
            while True:
                output = await self._state.stream.get()
                yield materialize(output)
                if output.finished:
                    return
        finally:
            if self._state.active:
                self.abort()

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidRequestError("this session's input has ended")
        if not self._state.active:
            raise self._state.error or InvalidRequestError("this session is over")
