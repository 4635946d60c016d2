"""The one error tree: what went wrong, whose fault it is, and what to do about it.

Every class fixes an HTTP `status` and a stable `type` string. A message states the value, what
is allowed and what to do; internals (tracebacks, paths of this host) go to the log and never into
a body.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error as it crosses a process boundary. `detail` is for the log only."""

    type: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    stage_id: int | None = None
    detail: str | None = None


class OmniError(Exception):
    """Base of everything OmniStage raises on purpose.

    `param` names the offending request field, `retry_after_s` when a retry makes sense,
    `stage_id` the stage that raised it and `detail` what only the log may show.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        stage_id: int | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.stage_id = stage_id
        self.detail = detail

    def to_record(self) -> ErrorRecord:
        return ErrorRecord(
            type=self.type,
            message=self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            stage_id=self.stage_id,
            detail=self.detail,
        )


class InvalidRequestError(OmniError, ValueError):
    """The request cannot be served as it stands."""

    status, type = 400, "invalid_request_error"


class UnsupportedCombinationError(InvalidRequestError):
    """Each value is fine alone; together they are not. 400 at request time, exit 2 at start."""

    status, type = 400, "unsupported_combination"


class AuthenticationError(OmniError):
    status, type = 401, "authentication_error"


class NotFoundError(OmniError, LookupError):
    status, type = 404, "not_found"


class PayloadTooLargeError(InvalidRequestError):
    status, type = 413, "payload_too_large"


class OverloadedError(OmniError):
    """Admission is full. Nothing was started; the client may retry after `retry_after_s`."""

    status, type = 429, "overloaded"


class UnavailableError(OmniError):
    """The server cannot take work now: starting, draining, or a stage has no live replica."""

    status, type = 503, "unavailable"


class RequestCancelledError(OmniError):
    """Somebody asked for the end of this request: the client, a disconnect, or a shutdown."""

    status, type = 499, "cancelled"


class SlowClientError(RequestCancelledError):
    """The client stopped reading its stream for longer than the policy allows."""

    status, type = 499, "slow_client"


class DeadlineExceededError(OmniError, TimeoutError):
    status, type = 504, "deadline_exceeded"


class OutOfMemoryError(OmniError):
    """One request did not fit in memory. The stage goes on serving."""

    status, type = 503, "out_of_memory"


class StageLostError(OmniError):
    """The replica that held this request died or hung. The pool restarts it."""

    status, type = 503, "stage_lost"


class InternalError(OmniError):
    """A fault of ours. The body says only that; `detail` carries the rest to the log."""

    status, type = 500, "internal_error"


class ProtocolError(InternalError):
    """A message between processes is malformed, of an unknown kind or another version."""

    status, type = 500, "protocol_error"


class ConfigurationError(OmniError, ValueError):
    """The deployment cannot start as configured. The CLI prints one line and exits with code 2."""

    status, type = 500, "configuration_error"
    exit_code: ClassVar[int] = 2


class CheckpointError(ConfigurationError):
    """A model directory is missing, malformed or incomplete."""

    status, type = 500, "checkpoint_error"


class MissingDependencyError(ConfigurationError):
    """An optional package is needed and absent; the message carries the install command."""

    status, type = 500, "missing_dependency"


def error_classes() -> dict[str, type[OmniError]]:
    """Every concrete class of this module by its stable `type`. A class derived elsewhere crosses a
    process boundary as the class here that it derives its `type` from."""
    found: dict[str, type[OmniError]] = {InternalError.type: InternalError}
    pending = list(OmniError.__subclasses__())
    while pending:
        cls = pending.pop()
        if cls.__module__ == __name__:
            found[cls.type] = cls
            pending.extend(cls.__subclasses__())
    return found


def from_record(record: ErrorRecord) -> OmniError:
    """Rebuild the error a peer process sent. An unknown type becomes an `InternalError`."""
    cls = error_classes().get(record.type)
    if cls is None:
        return InternalError(
            "a stage reported an error of an unknown kind",
            stage_id=record.stage_id,
            detail=f"{record.type}: {record.message}\n{record.detail or ''}",
        )
    return cls(
        record.message,
        param=record.param,
        retry_after_s=record.retry_after_s,
        stage_id=record.stage_id,
        detail=record.detail,
    )


def as_omni_error(error: BaseException, *, detail: str | None = None) -> OmniError:
    """Classify any exception: ours pass through, out of memory is recognised by its type's name
    (so that this module needs no torch), everything else is internal with nothing leaked."""
    if isinstance(error, OmniError):
        if error.detail is None:
            error.detail = detail
        return error
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OutOfMemoryError(
            "this request does not fit in the device's memory; ask for a smaller size, "
            "fewer images or fewer frames",
            detail=detail or str(error),
        )
    return InternalError(
        "internal error; the server's log has the details under this request id",
        detail=detail or f"{type(error).__name__}: {error}",
    )
