"""`Omni`: the engine for scripts and notebooks, without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import InvalidRequestError, OmniError
from omnistage.contracts.identity import new_request_id
from omnistage.contracts.outputs import OmniRequestOutput
from omnistage.contracts.requests import PromptLike
from omnistage.contracts.sampling import SamplingParams
from omnistage.engine.async_omni import AsyncOmni
from omnistage.engine.progress import ProgressReport
from omnistage.engine.results import ResultCollector

T = TypeVar("T")


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
        self._closed = False
        self._thread.start()
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
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput]:
        """One output for each prompt, in order.

        `sampling_params` is one set for all prompts or one for each; `sampling_params_list` one for
        each stage. A prompt that fails has its `error` set and does not disturb the others.
        `use_tqdm` shows a progress bar while the work lasts.
        """
        many = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        params = _one_each(sampling_params, len(many))
        return self._run(self._generate(many, params, sampling_params_list, use_tqdm))

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
            self._run(events.aclose())  # type: ignore[attr-defined]

    def abort(self, request_id: str) -> bool:
        """Cancel a request; True when nothing is left of it."""
        return self._run(self._engine.abort(request_id))

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._run(self._engine.shutdown())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self.config.limits.shutdown_timeout_s)
            self._loop.close()

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
        by_stage: Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[OmniRequestOutput]:
        with ProgressReport(len(prompts), enabled=use_tqdm) as report:
            # Never more at once than the engine admits: the rest waits here.
            places = asyncio.Semaphore(self.config.limits.max_inflight_requests)
            tasks = [
                self._generate_one(prompt, one, by_stage, report, places)
                for prompt, one in zip(prompts, params, strict=True)
            ]
            return await asyncio.gather(*tasks)

    async def _generate_one(
        self,
        prompt: PromptLike,
        params: SamplingParams | None,
        by_stage: Sequence[SamplingParams] | None,
        report: ProgressReport,
        places: asyncio.Semaphore,
    ) -> OmniRequestOutput:
        request_id = new_request_id()
        collector = ResultCollector(request_id, prompt)
        try:
            async with places:
                async for event in self._engine.generate(
                    prompt, params, request_id, sampling_params_list=by_stage
                ):
                    report.update(event)
                    collector.add(event)
        except OmniError as error:
            return collector.fail(error)
        finally:
            report.finish(request_id)
        return collector.result()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


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
