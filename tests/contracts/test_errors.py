"""The error table, and errors on their way between processes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.contracts import errors
from omnistage.contracts.errors import (
    ConfigurationError,
    ErrorRecord,
    InternalError,
    InvalidRequestError,
    OmniError,
    OutOfMemoryError,
    as_omni_error,
    error_classes,
    from_record,
)
from tests.contracts.strategies import structs

TABLE = {
    "authentication_error": (401, "AuthenticationError"),
    "cancelled": (499, "RequestCancelledError"),
    "checkpoint_error": (500, "CheckpointError"),
    "configuration_error": (500, "ConfigurationError"),
    "deadline_exceeded": (504, "DeadlineExceededError"),
    "internal_error": (500, "InternalError"),
    "invalid_request_error": (400, "InvalidRequestError"),
    "missing_dependency": (500, "MissingDependencyError"),
    "not_found": (404, "NotFoundError"),
    "out_of_memory": (503, "OutOfMemoryError"),
    "overloaded": (429, "OverloadedError"),
    "payload_too_large": (413, "PayloadTooLargeError"),
    "protocol_error": (500, "ProtocolError"),
    "slow_client": (499, "SlowClientError"),
    "stage_lost": (503, "StageLostError"),
    "unavailable": (503, "UnavailableError"),
    "unsupported_combination": (400, "UnsupportedCombinationError"),
}


def concrete() -> list[type[OmniError]]:
    module = vars(errors).values()
    return [
        cls
        for cls in module
        if isinstance(cls, type) and issubclass(cls, OmniError) and cls is not OmniError
    ]


@pytest.mark.invariant("ERR-INV-001")
def test_the_table_is_complete_and_stable() -> None:
    found = {cls.type: (cls.status, cls.__name__) for cls in concrete()}
    assert found == TABLE


@pytest.mark.invariant("ERR-INV-001")
def test_every_type_belongs_to_one_class() -> None:
    types = [cls.type for cls in concrete()]
    assert len(types) == len(set(types))
    assert {name: cls.__name__ for name, cls in error_classes().items()} == {
        name: row[1] for name, row in TABLE.items()
    }


@pytest.mark.invariant("ERR-INV-100")
@pytest.mark.parametrize("cls", concrete())
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_an_error_survives_the_way_between_processes(
    cls: type[OmniError], data: st.DataObject
) -> None:
    record = data.draw(structs(ErrorRecord))
    error = cls(
        record.message,
        param=record.param,
        retry_after_s=record.retry_after_s,
        stage_id=record.stage_id,
        detail=record.detail,
    )
    wire = msgspec.msgpack.encode(error.to_record())
    again = from_record(msgspec.msgpack.decode(wire, type=ErrorRecord))
    assert type(again) is cls
    assert again.to_record() == error.to_record()
    assert str(again) == record.message


class DerivedElsewhere(InvalidRequestError):
    def __init__(self, host: str) -> None:
        super().__init__(f"{host} is refused")


@pytest.mark.invariant("ERR-INV-100")
def test_a_class_derived_elsewhere_crosses_as_its_base() -> None:
    again = from_record(DerivedElsewhere("example.com").to_record())
    assert type(again) is InvalidRequestError
    assert again.message == "example.com is refused"


@pytest.mark.invariant("ERR-INV-100")
def test_an_error_of_an_unknown_kind_is_internal_and_tells_only_the_log() -> None:
    error = from_record(ErrorRecord(type="novel", message="secret", stage_id=1, detail="more"))
    assert type(error) is InternalError
    assert "secret" not in error.message
    assert error.detail == "novel: secret\nmore"
    assert error.stage_id == 1


class OutOfMemoryLookalike(RuntimeError):
    pass


OutOfMemoryLookalike.__name__ = "OutOfMemoryError"


@pytest.mark.invariant("ERR-INV-200")
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (MemoryError("host"), OutOfMemoryError),
        (OutOfMemoryLookalike("CUDA out of memory"), OutOfMemoryError),
        (KeyError("/home/someone/private"), InternalError),
        (ValueError("bad"), InternalError),
    ],
)
def test_foreign_errors_are_classified_and_leak_nothing(
    raised: Exception, expected: type[OmniError]
) -> None:
    error = as_omni_error(raised, detail="Traceback …")
    assert type(error) is expected
    assert error.detail == "Traceback …"
    assert str(raised) not in error.message
    assert str(raised.args[0]) in (as_omni_error(raised).detail or "")


@pytest.mark.invariant("ERR-INV-200")
def test_our_own_errors_pass_through_unchanged() -> None:
    error = InvalidRequestError("no", param="size")
    assert as_omni_error(error, detail="Traceback …") is error
    assert error.detail == "Traceback …"
    assert as_omni_error(error, detail="second") is error
    assert error.detail == "Traceback …"


@pytest.mark.invariant("ERR-INV-201")
def test_cancellation_is_no_failure_of_ours() -> None:
    cancelled = [cls for cls in concrete() if cls.status == 499]
    assert {cls.__name__ for cls in cancelled} == {"RequestCancelledError", "SlowClientError"}
    assert not any(issubclass(cls, InternalError | InvalidRequestError) for cls in cancelled)


@pytest.mark.invariant("ERR-INV-202")
def test_start_errors_end_the_command_with_code_2() -> None:
    starts = [cls for cls in concrete() if issubclass(cls, ConfigurationError)]
    assert {cls.__name__ for cls in starts} == {
        "ConfigurationError",
        "CheckpointError",
        "MissingDependencyError",
    }
    assert all(cls.exit_code == 2 for cls in starts)
