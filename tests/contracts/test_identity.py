"""Who a message is about."""

from __future__ import annotations

import time

import pytest

from omnistage.contracts.identity import RequestIdentity, new_request_id

WHOLE = RequestIdentity(
    request_id="r", priority=3, deadline_unix_s=5.0, trace_context="00-aa-bb-01"
)


@pytest.mark.invariant("IO-INV-100")
def test_a_child_keeps_everything_but_its_number_and_role() -> None:
    child = WHOLE.child(2, "negative")
    assert child == RequestIdentity(
        request_id="r",
        child_index=2,
        role="negative",
        priority=3,
        deadline_unix_s=5.0,
        trace_context="00-aa-bb-01",
    )
    assert child.key == ("r", 2)
    assert str(child) == "r#2"
    assert str(WHOLE) == "r"
    assert WHOLE.key == ("r", 0)


@pytest.mark.invariant("IO-INV-100")
def test_an_identity_cannot_change() -> None:
    with pytest.raises(AttributeError):
        WHOLE.request_id = "other"  # type: ignore[misc]


def test_remaining_time_is_never_negative() -> None:
    assert RequestIdentity(request_id="r").remaining_s() is None
    assert WHOLE.remaining_s() == 0.0
    later = RequestIdentity(request_id="r", deadline_unix_s=time.time() + 1000)
    remaining = later.remaining_s()
    assert remaining is not None
    assert 0 < remaining <= 1000


def test_new_ids_differ() -> None:
    ids = {new_request_id("img") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(name.startswith("img-") for name in ids)
