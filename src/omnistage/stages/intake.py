"""Incoming side of a replica: payloads become scheduler requests, through the model's adapters."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import as_omni_error
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import AppendInput, EndInput, InputConsumed, Submit
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import (
    Emission,
    Executor,
    InputAdapter,
    Scheduler,
    StageRequest,
)
from omnistage.contracts.sampling import SamplingParams
from omnistage.stages.emitter import Emitter, MessageSink
from omnistage.stages.imports import load_object
from omnistage.transport.base import Connector


class Intake:
    """Used by the replica's executing thread only. A payload that cannot be taken in fails its
    own child and nothing else."""

    def __init__(
        self,
        stage: ResolvedStage,
        connector: Connector,
        emitter: Emitter,
        scheduler: Scheduler,
        executor: Executor,
        post: MessageSink,
    ) -> None:
        self._connector = connector
        self._emitter = emitter
        self._scheduler = scheduler
        self._executor = executor
        self._post = post
        self._params: dict[RequestKey, SamplingParams] = {}
        self._adapters: dict[int, InputAdapter] = {
            source: load_object(path) for source, path in stage.stage.input_adapters.items()
        }

    def submit(self, message: Submit, frames: Sequence[Any]) -> None:
        identity = message.identity
        self._params[identity.key] = message.params
        self._emitter.open(identity, message.credits)

        def add() -> None:
            request = StageRequest(
                identity=identity,
                data=self._take(message, frames),
                params=message.params,
                input_complete=message.input_complete,
            )
            self._scheduler.add(request)
            self._scheduler.set_credits(identity.key, message.credits)

        self._guarded(identity, add)

    def append(self, message: AppendInput, frames: Sequence[Any]) -> None:
        identity = message.identity
        if not self._emitter.is_open(identity.key):
            self._say_consumed(message)  # Its child has ended: nobody else will free it.
            return

        def append() -> None:
            data = self._take(message, frames)
            self._scheduler.append_input(identity, data, message.epoch)
            if message.input_complete:
                self._scheduler.end_input(identity, message.epoch)

        self._guarded(identity, append)

    def end(self, message: EndInput) -> None:
        identity = message.identity
        if self._emitter.is_open(identity.key):
            self._guarded(identity, lambda: self._scheduler.end_input(identity, message.epoch))

    @property
    def num_children(self) -> int:
        return len(self._params)

    def forget(self, key: RequestKey) -> None:
        self._params.pop(key, None)

    def _take(self, message: Submit | AppendInput, frames: Sequence[Any]) -> StageData:
        """Copy the payload in, tell its producer, and adapt it to this stage."""
        started = time.monotonic()
        data = self._connector.receive(message.payload, frames)
        self._say_consumed(message, time.monotonic() - started)
        source = message.source_stage_id
        adapter = None if source is None else self._adapters.get(source)
        if adapter is None:
            return data
        return adapter(data, self._params[message.identity.key], self._executor)

    def _say_consumed(self, message: Submit | AppendInput, rx_s: float = 0.0) -> None:
        self._post(
            InputConsumed(
                identity=message.identity,
                source_stage_id=message.source_stage_id,
                sequence=message.sequence,
                rx_s=rx_s,
                nbytes=message.payload.nbytes,
            )
        )

    def _guarded(self, identity: RequestIdentity, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            failure = as_omni_error(error, detail=traceback.format_exc())
            self._scheduler.abort(identity.key)
            self._emitter.emit(Emission(identity=identity, error=failure))
            self._executor.release(identity.key)
            self.forget(identity.key)
