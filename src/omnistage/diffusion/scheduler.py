"""Request mode: one whole pipeline call per command, best priority first, then first come."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest
from omnistage.contracts.sampling import OmniDiffusionSamplingParams, merge_defaults
from omnistage.diffusion.options import DiffusionOptions
from omnistage.diffusion.streamed_input import InputBuffer

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage

GENERATE = "generate"
SEED_BITS = 63


@dataclass(slots=True)
class _Entry:
    request: StageRequest
    inputs: InputBuffer
    params: dict[str, Any]
    arrays: dict[str, Any]
    arrival: int
    credits: int | None = None

    @property
    def ready(self) -> bool:
        return self.inputs.complete and self.credits != 0

    @property
    def order(self) -> tuple[int, int]:
        return (-self.request.identity.priority, self.arrival)


@dataclass(slots=True)
class RequestScheduler:
    """Holds at most `max_queued_requests` waiting children and runs one at a time.

    A child is its own from `add` to the emission that ends it or to `abort`. `defaults` are the
    stage's sampling parameters; the request's own win.
    """

    max_queued_requests: int
    defaults: dict[str, Any] = field(default_factory=dict)
    _waiting: dict[RequestKey, _Entry] = field(default_factory=dict)
    _running: dict[RequestKey, _Entry] = field(default_factory=dict)
    _arrivals: int = 0

    def add(self, request: StageRequest) -> None:
        """Raises `OverloadedError` when the queue is full, `InvalidRequestError` for parameters of
        another kind of stage and `InternalError` for a child that is here already."""
        key = request.identity.key
        if key in self._waiting or key in self._running:
            raise InternalError(f"request {request.identity} is already at this stage")
        if len(self._waiting) >= self.max_queued_requests:
            raise OverloadedError(
                f"{self.max_queued_requests} requests wait for this stage already; retry later, "
                "or raise options.max_queued_requests",
                retry_after_s=1.0,
            )
        inputs = InputBuffer(data=request.data, complete=request.input_complete)
        params, arrays = self._complete_params(request)
        self._waiting[key] = _Entry(request, inputs, params, arrays, self._arrivals)
        self._arrivals += 1

    def append_input(self, identity: RequestIdentity, data: StageData, epoch: int) -> None:
        if entry := self._waiting.get(identity.key):
            entry.inputs.append(data, epoch)

    def end_input(self, identity: RequestIdentity, epoch: int) -> None:
        if entry := self._waiting.get(identity.key):
            entry.inputs.end(epoch)

    def set_credits(self, key: RequestKey, credits: int) -> None:
        if entry := self._waiting.get(key):
            entry.credits = credits

    def abort(self, key: RequestKey) -> None:
        self._waiting.pop(key, None)
        self._running.pop(key, None)

    def next_command(self) -> Command | None:
        ready = [entry for entry in self._waiting.values() if entry.ready]
        if self._running or not ready:
            return None
        entry = min(ready, key=lambda entry: entry.order)
        identity = entry.request.identity
        self._running[identity.key] = self._waiting.pop(identity.key)
        return Command(name=GENERATE, identities=(identity,), data=_command_data(entry))

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        (identity,) = command.identities
        if self._running.pop(identity.key, None) is None:
            return ()
        result = results[0]
        timings_s = result.fields.pop("timings_s", {})
        return (
            Emission(
                identity=identity,
                data=result,
                final=True,
                finish_reason="stop",
                timings_s=timings_s,
            ),
        )

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        """Every child of the command that is still here ends with `error`."""
        held = [one for one in command.identities if self._running.pop(one.key, None) is not None]
        return tuple(Emission(identity=one, error=error, final=True) for one in held)

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        raise InternalError(f"request {identity}: request mode has no late outputs")

    def counts(self) -> tuple[int, int]:
        return (len(self._running), len(self._waiting))

    def _complete_params(self, request: StageRequest) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters as plain values, and their arrays apart. The seed is drawn here, once for all
        ranks, when the caller gave none."""
        if not isinstance(request.params, OmniDiffusionSamplingParams):
            raise InvalidRequestError(
                f"a diffusion stage takes OmniDiffusionSamplingParams, "
                f"got {type(request.params).__name__}"
            )
        params = merge_defaults(request.params, self.defaults)
        assert isinstance(params, OmniDiffusionSamplingParams)
        names = OmniDiffusionSamplingParams.TENSOR_FIELDS
        arrays = {name: value for name in names if (value := getattr(params, name)) is not None}
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        plain = msgspec.structs.replace(params, seed=seed, **dict.fromkeys(arrays))
        try:
            return msgspec.to_builtins(plain), arrays
        except TypeError as error:
            raise InvalidRequestError(
                f"extra_args must hold plain values only: {error}", param="extra_args"
            ) from error


def _command_data(entry: _Entry) -> StageData:
    data = entry.inputs.data
    return StageData(
        modality=data.modality,
        fields={**data.fields, "params": entry.params},
        tensors={**data.tensors, **entry.arrays},
    )


def request_scheduler(stage: ResolvedStage, options: DiffusionOptions) -> RequestScheduler:
    """Raises `UnsupportedCombinationError` for more than one request a command."""
    if stage.max_num_seqs > 1:
        raise UnsupportedCombinationError(
            f"max_num_seqs={stage.max_num_seqs}: request batching is not there yet; "
            "a diffusion stage in request mode takes max_num_seqs=1",
            param="max_num_seqs",
        )
    return RequestScheduler(options.max_queued_requests, stage.default_sampling_params)
