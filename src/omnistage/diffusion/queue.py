"""Requests that wait for their turn at a denoising stage: taken in, completed, ordered."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omnistage.contracts.errors import InternalError, InvalidRequestError, OverloadedError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import StageRequest
from omnistage.contracts.sampling import OmniDiffusionSamplingParams, merge_defaults
from omnistage.diffusion.streamed_input import InputBuffer

SEED_BITS = 63


@dataclass(slots=True)
class QueuedRequest:
    """One child. `overtaken` counts those that were admitted before it although they came later."""

    identity: RequestIdentity
    inputs: InputBuffer
    params: OmniDiffusionSamplingParams
    arrival: int
    arrived_s: float
    credits: int | None = None
    overtaken: int = 0
    batch_key: Hashable = None

    @property
    def key(self) -> RequestKey:
        return self.identity.key

    @property
    def ready(self) -> bool:
        return self.inputs.complete and self.credits != 0

    @property
    def order(self) -> tuple[int, int]:
        return (-self.identity.priority, self.arrival)

    def payload(self) -> StageData:
        """Inputs and parameters as they go to the executor: the field "params", and their arrays
        among the tensors."""
        arrays, plain = _split_arrays(self.params)
        data = self.inputs.data
        return StageData(
            modality=data.modality,
            fields={**data.fields, "params": plain},
            tensors={**data.tensors, **arrays},
        )


@dataclass(slots=True)
class WaitingQueue:
    """At most `capacity` requests, best priority first, then first come.

    `defaults` are the stage's sampling parameters; the request's own win. The seed is drawn here,
    once for all ranks, when the caller gave none. `check` refuses what the stage cannot do.
    """

    capacity: int
    defaults: dict[str, Any]
    batch_key: Callable[[OmniDiffusionSamplingParams, StageData], Hashable]
    clock: Callable[[], float]
    check: Callable[[OmniDiffusionSamplingParams], None] = lambda params: None
    _waiting: dict[RequestKey, QueuedRequest] = field(default_factory=dict)
    _arrivals: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting

    def add(self, request: StageRequest, *, is_here: bool = False) -> None:
        """Raises `OverloadedError` when the queue is full, `InvalidRequestError` for parameters of
        another kind of stage and `InternalError` for a child that is here already (`is_here`: not
        waiting any more)."""
        key = request.identity.key
        if is_here or key in self._waiting:
            raise InternalError(f"request {request.identity} is already at this stage")
        if len(self._waiting) >= self.capacity:
            raise OverloadedError(
                f"{self.capacity} requests wait for this stage already; retry later, "
                "or raise options.max_queued_requests",
                retry_after_s=1.0,
            )
        self._waiting[key] = QueuedRequest(
            identity=request.identity,
            inputs=InputBuffer(data=request.data, complete=request.input_complete),
            params=self._complete_params(request),
            arrival=self._arrivals,
            arrived_s=self.clock(),
        )
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

    def remove(self, key: RequestKey) -> None:
        self._waiting.pop(key, None)

    def ready(self) -> list[QueuedRequest]:
        """Those whose input is complete, in order, each with its `batch_key`."""
        found = sorted(
            (one for one in self._waiting.values() if one.ready), key=lambda one: one.order
        )
        for one in found:
            if one.batch_key is None:
                one.batch_key = self.batch_key(one.params, one.inputs.data)
        return found

    def take(self, chosen: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """Remove `chosen`. Whoever is ready and stood before one of them has been overtaken."""
        taken = list(chosen)
        for one in taken:
            del self._waiting[one.key]
        if taken:
            last = max(one.order for one in taken)
            for waiting in self._before(last):
                waiting.overtaken += sum(waiting.order < one.order for one in taken)
        return taken

    def _before(self, order: tuple[int, int]) -> Iterator[QueuedRequest]:
        return (one for one in self._waiting.values() if one.ready and one.order < order)

    def _complete_params(self, request: StageRequest) -> OmniDiffusionSamplingParams:
        if not isinstance(request.params, OmniDiffusionSamplingParams):
            raise InvalidRequestError(
                f"a diffusion stage takes OmniDiffusionSamplingParams, "
                f"got {type(request.params).__name__}"
            )
        params = merge_defaults(request.params, self.defaults)
        assert isinstance(params, OmniDiffusionSamplingParams)
        _split_arrays(params)
        self.check(params)
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        return msgspec.structs.replace(params, seed=seed)


def _split_arrays(params: OmniDiffusionSamplingParams) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters' arrays, and all else as plain values."""
    names = OmniDiffusionSamplingParams.TENSOR_FIELDS
    arrays = {name: value for name in names if (value := getattr(params, name)) is not None}
    try:
        plain = msgspec.to_builtins(msgspec.structs.replace(params, **dict.fromkeys(arrays)))
    except TypeError as error:
        raise InvalidRequestError(
            f"extra_args must hold plain values only: {error}", param="extra_args"
        ) from error
    return arrays, plain
