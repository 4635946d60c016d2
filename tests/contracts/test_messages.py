"""Messages: exact round trips, and nothing unknown gets in."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnistage.contracts import messages
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.messages import FromRank, FromReplica, Message, ToRank, ToReplica
from omnistage.contracts.payloads import PayloadRef
from tests.contracts.strategies import structs

DIRECTIONS = {
    "to replica": ToReplica,
    "from replica": FromReplica,
    "to rank": ToRank,
    "from rank": FromRank,
}
KINDS = [
    pytest.param(direction, cls, id=cls.__name__)
    for direction in DIRECTIONS.values()
    for cls in get_args(direction)
]
few = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


def decode(raw: bytes, direction: Any) -> Any:
    return msgspec.msgpack.decode(raw, type=direction)


def as_map(message: Message) -> dict[str, Any]:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert isinstance(decoded, dict)
    return decoded


@pytest.mark.invariant("IO-INV-001")
def test_every_message_goes_in_exactly_one_direction() -> None:
    def below(cls: type[Message]) -> set[type[Message]]:
        return {cls}.union(*[below(child) for child in cls.__subclasses__()])

    routed = [cls for direction in DIRECTIONS.values() for cls in get_args(direction)]
    assert set(routed) == below(Message) - {Message}
    assert len(routed) == len(set(routed))
    tags = [cls.__struct_config__.tag for cls in routed]
    assert len(tags) == len(set(tags))


@pytest.mark.invariant("IO-INV-200")
@pytest.mark.parametrize(("direction", "cls"), KINDS)
@given(data=st.data())
@few
def test_a_round_trip_changes_nothing(direction: Any, cls: type[Message], data: Any) -> None:
    message = data.draw(structs(cls))
    again = decode(msgspec.msgpack.encode(message), direction)
    assert type(again) is cls
    assert again == message


@pytest.mark.invariant("IO-INV-201")
@pytest.mark.parametrize(("direction", "cls"), KINDS)
@given(data=st.data())
@few
def test_unknown_fields_and_kinds_are_refused(
    direction: Any, cls: type[Message], data: Any
) -> None:
    plain = as_map(data.draw(structs(cls)))
    with pytest.raises(msgspec.ValidationError, match="unknown field `surprise`"):
        decode(msgspec.msgpack.encode(plain | {"surprise": 1}), direction)
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'surprise'"):
        decode(msgspec.msgpack.encode(plain | {"kind": "surprise"}), direction)
    del plain["kind"]
    with pytest.raises(msgspec.ValidationError, match="missing required field `kind`"):
        decode(msgspec.msgpack.encode(plain), direction)


@pytest.mark.invariant("IO-INV-201")
@pytest.mark.parametrize(("direction", "cls"), KINDS)
@given(data=st.data())
@few
def test_wrong_types_are_refused(direction: Any, cls: type[Message], data: Any) -> None:
    plain = as_map(data.draw(structs(cls)))
    for field in msgspec.structs.fields(cls):
        if field.type is not Any:
            with pytest.raises(msgspec.ValidationError):
                decode(msgspec.msgpack.encode(plain | {field.name: [{"x": 1}]}), direction)


@pytest.mark.invariant("IO-INV-201")
@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"not msgpack at all", b"\x93\x01\x02\x03"])
@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
def test_garbage_is_refused(direction: Any, raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(raw, direction)


@pytest.mark.invariant("IO-INV-201")
def test_a_message_in_the_wrong_direction_is_refused() -> None:
    raw = msgspec.msgpack.encode(messages.Drain())
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'drain'"):
        decode(raw, FromReplica)


REQUIRED = {
    "Submit": {"identity", "source_stage_id", "sequence", "payload", "params", "input_complete"},
    "AppendInput": {"identity", "source_stage_id", "sequence", "payload"},
    "Output": {"identity", "sequence", "payload", "final"},
    "Failed": {"identity", "error"},
    "Aborted": {"identity"},
}


@pytest.mark.invariant("IO-INV-101")
@pytest.mark.parametrize("name", REQUIRED)
def test_what_a_producer_must_say_has_no_default(name: str) -> None:
    cls = getattr(messages, name)
    fields = {field.name: field for field in msgspec.structs.fields(cls)}
    assert all(fields[required].required for required in REQUIRED[name])


@pytest.mark.invariant("IO-INV-101")
@given(data=st.data())
@few
def test_an_output_that_does_not_say_whether_it_is_final_is_refused(data: Any) -> None:
    plain = as_map(data.draw(structs(messages.Output)))
    del plain["final"]
    with pytest.raises(msgspec.ValidationError, match="missing required field `final`"):
        decode(msgspec.msgpack.encode(plain), FromReplica)


@pytest.mark.invariant("IO-INV-002")
@given(data=st.data())
@few
def test_a_payload_without_a_known_modality_is_refused(data: Any) -> None:
    plain = msgspec.to_builtins(data.draw(structs(PayloadRef)))
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'smell'"):
        msgspec.convert(plain | {"modality": "smell"}, PayloadRef)
    del plain["modality"]
    with pytest.raises(msgspec.ValidationError, match="missing required field `modality`"):
        msgspec.convert(plain, PayloadRef)


@pytest.mark.invariant("IO-INV-100")
@pytest.mark.parametrize(("direction", "cls"), KINDS)
@given(data=st.data())
@few
def test_identity_survives_the_hop(direction: Any, cls: type[Message], data: Any) -> None:
    about_requests = {"identity", "identities", "cancelled"} & set(cls.__struct_fields__)
    message = data.draw(structs(cls))
    again = decode(msgspec.msgpack.encode(message), direction)
    for name in about_requests:
        assert getattr(again, name) == getattr(message, name)
    values = [getattr(again, name) for name in about_requests]
    for value in values:
        for identity in value if isinstance(value, tuple) else [value]:
            assert isinstance(identity, RequestIdentity)
