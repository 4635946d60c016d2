"""`AsyncOmni`: the engine as an asyncio object. The server and `Omni` stand on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import (
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
)
from omnistage.contracts.outputs import OmniRequestOutput
from omnistage.contracts.payloads import StageData
from omnistage.contracts.requests import OmniRequest, PromptLike
from omnistage.contracts.sampling import SamplingParams
from omnistage.engine.admission import make_children, make_request, needed_stages
from omnistage.engine.configure import configure
from omnistage.engine.health import EngineHealth, engine_health
from omnistage.engine.orchestrator import Orchestrator
from omnistage.engine.request_state import RequestState
from omnistage.engine.results import materialize
from omnistage.engine.session import OmniSession
from omnistage.engine.streams import OutputStream
from omnistage.observability.metrics import EngineMetrics
from omnistage.stages.controls import START_PROFILE, STOP_PROFILE
from omnistage.stages.pool import ReplicaState


class AsyncOmni:
    """Serves one model. Use it as an async context manager, or call `start` and `shutdown`.

    `model` is a local directory, a hub id or a bundled model such as "omnistage/tiny-image";
    further keyword arguments override the deploy configuration. `AsyncOmni(config=…)` takes an
    already resolved configuration. Raises `ConfigurationError` for what cannot be.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: OmniConfig | None = None,
        deploy_config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        if (model is None) == (config is None):
            raise InvalidRequestError("give a model or a config, and not both")
        if config is None:
            assert model is not None
            config = configure(model, deploy_config=deploy_config, **settings)
        self.config: OmniConfig = config
        self.metrics = EngineMetrics(config.served_model_name)
        self._orchestrator: Orchestrator | None = None
        self._started = False
        self._ending: asyncio.Task[None] | None = None

    # lifecycle --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all stages and wait until they are ready.

        Raises what the first failing stage reported; nothing is left running then.
        """
        if self._orchestrator is not None:
            raise UnavailableError("this engine was started before; make a new one")
        self._orchestrator = Orchestrator(self.config, self.metrics)
        self._orchestrator.start()
        try:
            await self._orchestrator.supervisor.start()
        except BaseException:
            await self.shutdown()
            raise
        self._started = True

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what is running; False when some still runs after
        `timeout_s`. Once nothing runs the stages end by themselves; `shutdown` follows."""
        if self._orchestrator is None:
            return True
        self._orchestrator.table.draining = True
        if not await self._orchestrator.table.wait_empty(timeout_s):
            return False
        self._orchestrator.supervisor.drain()
        return True

    async def shutdown(self) -> None:
        """Fail what is running and end every process. May be called at any time, several times and
        at once: every call returns when all is over."""
        if self._orchestrator is None:
            return
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(self._orchestrator), name="shutdown")
        await asyncio.shield(self._ending)

    async def _end(self, orchestrator: Orchestrator) -> None:
        try:
            await orchestrator.close()
        finally:
            await orchestrator.supervisor.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    # requests ---------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptLike | StageData,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params_list: Sequence[SamplingParams] | None = None,
        output_modalities: Sequence[str] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        trace_context: str | None = None,
        n: int = 1,
        delta: bool = True,
    ) -> AsyncIterator[OmniRequestOutput]:
        """Yield progress, partial and final events; the last one has `finished` set.

        `sampling_params` goes to every stage that takes its kind, `sampling_params_list` has one
        entry a stage; `n` asks for that many answers, each a child. `delta` False: texts may come
        in one piece. A failure raises an `OmniError`. Closing the iterator, or cancelling the task
        that reads it, aborts the request at every stage.
        """
        request = make_request(
            self.config,
            prompt,
            sampling_params,
            request_id=request_id,
            sampling_params_list=sampling_params_list,
            output_modalities=output_modalities,
            priority=priority,
            timeout_s=timeout_s,
            trace_context=trace_context,
            num_children=n,
            delta=delta,
        )
        state = self._admit(request)
        try:
            while True:
                output = await state.stream.get()
                yield materialize(output)
                if output.finished:
                    return
        finally:
            if state.active:
                self._running().abort(state.request_id)

    def open_session(
        self,
        first_input: PromptLike | StageData,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> OmniSession:
        """A request whose input goes on: `append_input`, `end_input`, iterate for the outputs."""
        request = make_request(
            self.config,
            first_input,
            sampling_params,
            request_id=request_id,
            streaming_input=True,
            **options,
        )
        state = self._admit(request)
        return OmniSession(self._running(), state, self.config)

    async def abort(self, request_id: str) -> bool:
        """Cancel a request at every stage and wait until it holds nothing there any more.

        False when it is unknown, or some stage did not confirm within `abort_timeout_s`.
        """
        state = self._running().abort(
            request_id, RequestCancelledError("the request was cancelled by its owner")
        )
        if state is None:
            return False
        try:
            await asyncio.wait_for(state.released.wait(), 2 * self.config.limits.abort_timeout_s)
        except TimeoutError:
            return False
        return not state.unconfirmed

    async def collective_rpc(
        self, method: str, arguments: dict[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> list[Any]:
        """Call `method` on the executor of every ready replica, in stage and replica order.

        Raises the first error of any, `DeadlineExceededError` for an answer that does not come.
        """
        orchestrator = self._running()
        replicas = [r for pool in orchestrator.supervisor.pools for r in pool.replicas]
        calls = [
            orchestrator.calls.call(replica, method, arguments or {}, timeout_s)
            for replica in replicas
            if replica.state is ReplicaState.READY
        ]
        return await asyncio.gather(*calls)

    async def call_stage(
        self,
        stage_id: int,
        method: str,
        arguments: dict[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Any:
        """Call `method` on the executor of one ready replica of a stage: what every replica answers
        alike. Raises its error, `UnavailableError` when none is ready."""
        orchestrator = self._running()
        pool = orchestrator.supervisor.pools[stage_id]
        for replica in pool.replicas:
            if replica.state is ReplicaState.READY:
                return await orchestrator.calls.call(replica, method, arguments or {}, timeout_s)
        raise UnavailableError(f"stage {pool.stage.name!r} has no replica that is ready")

    async def start_profile(self, directory: str | Path, **bounds: Any) -> None:
        """Record what every leader executes, in traces below `directory`, until `stop_profile` or
        a bound: `max_steps` commands, `max_s` seconds."""
        await self.collective_rpc(START_PROFILE, {"directory": str(directory), **bounds})

    async def stop_profile(self) -> list[Path]:
        """The traces written since `start_profile`."""
        return [Path(name) for names in await self.collective_rpc(STOP_PROFILE) for name in names]

    def health(self) -> EngineHealth:
        if self._orchestrator is None:
            return EngineHealth(live=False, ready=False, reason="not started")
        return engine_health(
            self._orchestrator.supervisor.pools,
            started=self._started,
            draining=self._orchestrator.table.draining,
        )

    @property
    def num_requests(self) -> int:
        """Requests in flight, those still being cancelled included."""
        return len(self._orchestrator.table) if self._orchestrator else 0

    def _admit(self, request: OmniRequest) -> RequestState:
        orchestrator = self._running()
        windows = {stage.stage_id: stage.output_window for stage in self.config.stages}
        request_id = request.identity.request_id
        state = RequestState(
            request=request,
            stream=OutputStream(
                windows,
                self.config.limits.stream_buffer,
                lambda full: orchestrator.slow_client(request_id, full),
            ),
            children=make_children(self.config.pipeline, request),
            needed=needed_stages(self.config.pipeline, request.output_modalities),
        )
        orchestrator.admit(state, input_complete=not request.streaming_input)
        return state

    def _running(self) -> Orchestrator:
        if self._orchestrator is None or not self._started:
            raise UnavailableError("the engine has not started; await start() first")
        return self._orchestrator
