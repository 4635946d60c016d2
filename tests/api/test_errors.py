from __future__ import annotations

import logging

import httpx
import pytest

from omnistage.api.errors import error_body, error_headers, field_path
from omnistage.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineExceededError,
    InternalError,
    OmniError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    StageLostError,
    UnavailableError,
    error_classes,
)
from tests.api.fake_engine import FakeEngine

GENERATIONS = "/v1/images/generations"
FOR_THE_LOG = (ProtocolError, ConfigurationError)
HIDDEN = "internal error; the server's log has the details under this request id"


@pytest.mark.invariant("ERR-INV-210")
@pytest.mark.parametrize("name", sorted(error_classes()))
async def test_every_class_of_error_renders_with_its_status_and_type(
    client: httpx.AsyncClient, engine: FakeEngine, name: str
) -> None:
    error = error_classes()[name]("what went wrong", param="size", detail="secret detail")
    engine.error = error
    response = await client.post(GENERATIONS, json={"prompt": "x"})
    assert response.status_code == error.status
    assert response.json() == {
        "error": {
            "message": HIDDEN if isinstance(error, FOR_THE_LOG) else "what went wrong",
            "type": error.type,
            "param": "size",
            "code": error.status,
        }
    }
    assert engine.metrics.requests == [(GENERATIONS, "POST", error.status)]


@pytest.mark.invariant("ERR-INV-210")
@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (StageLostError("gone"), "1"),
        (StageLostError("gone", retry_after_s=0.2), "1"),
        (StageLostError("gone", retry_after_s=7.1), "8"),
        (InternalError("broken"), None),
        (InternalError("broken", retry_after_s=4), "4"),
    ],
)
def test_retry_after_is_whole_seconds_where_a_retry_makes_sense(
    error: OmniError, seconds: str | None
) -> None:
    assert error_headers(error).get("Retry-After") == seconds


@pytest.mark.invariant("ERR-INV-211")
async def test_an_unexpected_exception_is_logged_once_and_not_shown(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.error = RuntimeError("secret of the house")
    with caplog.at_level(logging.ERROR):
        response = await client.post(GENERATIONS, json={"prompt": "x"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "internal_error"
    assert response.headers["x-request-id"]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "secret of the house" in str(record.exc_info[1])


@pytest.mark.invariant("ERR-INV-211")
async def test_detail_goes_to_the_log_only(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.error = StageLostError("stage 0 died; try again", detail="Traceback of the replica")
    with caplog.at_level(logging.ERROR):
        response = await client.post(GENERATIONS, json={"prompt": "x"})
    assert response.status_code == 503
    assert "Traceback" not in response.text
    assert len(caplog.records) == 1
    assert "Traceback of the replica" in caplog.text


@pytest.mark.invariant("ERR-INV-211")
@pytest.mark.parametrize("kind", [ProtocolError, CheckpointError])
async def test_messages_that_name_our_processes_and_paths_stay_inside(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    kind: type[OmniError],
) -> None:
    engine.error = kind("descriptor 7 of process 4242, /srv/models/secret")
    with caplog.at_level(logging.ERROR):
        response = await client.post(GENERATIONS, json={"prompt": "x"})
    assert (response.status_code, response.json()["error"]["type"]) == (500, kind.type)
    assert "4242" not in response.text
    assert "/srv" not in response.text
    assert "descriptor 7 of process 4242, /srv/models/secret" in caplog.text


async def test_refusing_work_is_no_error_in_the_log(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for engine.error in (UnavailableError("draining"), OverloadedError("full")):
            response = await client.post(GENERATIONS, json={"prompt": "x"})
            assert int(response.headers["retry-after"]) == 1
    assert caplog.records == []


@pytest.mark.invariant("ERR-INV-211")
async def test_prompts_are_not_logged(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="omnistage"):
        await client.post(GENERATIONS, json={"prompt": "private wish"})
        await client.post(GENERATIONS, json={"prompt": "private wish", "n": "private wish"})
        engine.error = DeadlineExceededError("too slow")
        await client.post(GENERATIONS, json={"prompt": "private wish"})
    assert caplog.records
    assert "private wish" not in caplog.text


@pytest.mark.invariant("ERR-INV-212")
async def test_cancellation_stays_distinct_from_failure(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.error = RequestCancelledError("aborted by the operator")
    with caplog.at_level(logging.ERROR):
        response = await client.post(GENERATIONS, json={"prompt": "x"})
    assert response.status_code == 499
    assert response.json()["error"]["type"] == "cancelled"
    assert caplog.records == []


@pytest.mark.invariant("ERR-INV-210")
async def test_routing_errors_have_the_same_form(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found"
    wrong = await client.put("/v1/images/generations")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["type"] == "method_not_allowed"
    assert "POST" in wrong.json()["error"]["message"]


def test_paths_read_as_clients_write_them() -> None:
    assert field_path(("messages", 0, "content", "<parts>", 2, "url")) == (
        "messages[0].content[2].url"
    )
    assert error_body(InternalError("x"))["error"]["param"] is None
