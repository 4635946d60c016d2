"""`Omni`: the engine for scripts and notebooks, without asyncio."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import InvalidRequestError, OmniError, UnavailableError
from omnistage.contracts.identity import new_request_id
from omnistage.contracts.outputs import OmniRequestOutput
from omnistage.contracts.requests import PromptLike
from omnistage.contracts.sampling import SamplingParams
from omnistage.engine.async_omni import AsyncOmni
from omnistage.engine.conversations import is_conversation
from omnistage.engine.progress import ProgressReport
from omnistage.engine.results import ResultCollector

T = TypeVar("T")
_LAST_WORDS_S = 2.0


class Omni:
    """Loads a model and generates from prompts.

    Arguments are those of `AsyncOmni`. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: OmniConfig | None = None,
        deploy_config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self._engine = AsyncOmni(model, config=config, deploy_config=deploy_config, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="omnistage-engine", daemon=True
        )
        self._closed = threading.Lock()
        """Held for good by whoever closes first."""
        self._places = asyncio.Semaphore(self.config.limits.max_inflight_requests)
        self._thread.start()
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)
        try:
            self._run(self._engine.start())
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> OmniConfig:
        return self._engine.config

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params_list: Sequence[SamplingParams] | None = None,
        output_modalities: Sequence[str] | None = None,
        n: int = 1,
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput]:
        """One output for each prompt, in order. A list of messages is one prompt.

        `sampling_params` is one set for all prompts or one for each; `sampling_params_list` one for
        each stage; `output_modalities` names the wanted outputs, `n` how many answers each prompt
        gets (`outputs`). A prompt that fails has its `error` set and does not disturb the others.
        `use_tqdm` shows a progress bar while the work lasts.
        """
        one = isinstance(prompts, str | dict) or is_conversation(prompts)
        many: list[Any] = [prompts] if one else list(prompts)
        params = _one_each(sampling_params, len(many))
        options = {
            "sampling_params_list": sampling_params_list,
            "output_modalities": output_modalities,
            "n": n,
        }
        return self._run(self._generate(many, params, options, use_tqdm))

    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[OmniRequestOutput]:
        """The events of one request as they come. Raises the request's error."""
        events = self._engine.generate(prompt, sampling_params, **options)
        try:
            while True:
                try:
                    yield self._run(anext(events))  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
        finally:
            if not self._closed.locked():
                self._run(events.aclose())  # type: ignore[attr-defined]

    def abort(self, request_id: str) -> bool:
        """Cancel a request; True when nothing is left of it."""
        return self._run(self._engine.abort(request_id))

    def close(self) -> None:
        """End everything; calls that run in other threads end with an error. Idempotent."""
        if not self._closed.acquire(blocking=False):
            self._thread.join(2 * self.config.limits.shutdown_timeout_s)
            return
        atexit.unregister(self._at_exit)
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self.config.limits.shutdown_timeout_s)
            if not self._thread.is_alive():
                self._loop.close()

    async def _end(self) -> None:
        """Whatever still runs on the loop sees the shutdown and ends, or is cancelled."""
        await self._engine.shutdown()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, stuck = await asyncio.wait(others, timeout=_LAST_WORDS_S)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _generate(
        self,
        prompts: list[PromptLike],
        params: list[SamplingParams | None],
        options: dict[str, Any],
        use_tqdm: bool,
    ) -> list[OmniRequestOutput]:
        with ProgressReport(len(prompts), enabled=use_tqdm) as report:
            tasks = [
                self._generate_one(prompt, one, options, report)
                for prompt, one in zip(prompts, params, strict=True)
            ]
            return await asyncio.gather(*tasks)

    async def _generate_one(
        self,
        prompt: PromptLike,
        params: SamplingParams | None,
        options: dict[str, Any],
        report: ProgressReport,
    ) -> OmniRequestOutput:
        """Never more at once than the engine admits: the rest waits for a place."""
        request_id = new_request_id()
        collector = ResultCollector(request_id, prompt)
        try:
            async with self._places:
                try:
                    async for event in self._engine.generate(
                        prompt, params, request_id, delta=False, **options
                    ):
                        report.update(event)
                        collector.add(event)
                except OmniError:
                    await self._engine.abort(request_id)  # Its place is free when it is released.
                    raise
        except OmniError as error:
            return collector.fail(error)
        finally:
            report.finish(request_id)
        return collector.result()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; Ctrl-C cancels it."""
        if self._closed.locked():
            work.close()
            raise UnavailableError("this Omni is closed; make a new one")
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidRequestError("Omni was called from its own event loop; use AsyncOmni")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _close_if_alive(omni: weakref.ref[Omni]) -> None:
    """At the interpreter's exit: threads and processes of an engine that nobody closed."""
    alive = omni()
    if alive is not None:
        alive.close()


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling parameters for {count} prompts; give one, or one for each"
        )
    return list(params)
