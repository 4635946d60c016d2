from __future__ import annotations

from typing import Any

import pytest

from omnistage.api.middleware.auth import AuthMiddleware
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import ConfigurationError
from tests.api.conftest import open_client
from tests.api.fake_engine import FakeEngine

SETTINGS = ApiSettings(api_keys=("first-key", "schlüssel"))


@pytest.mark.invariant("ENTRY-INV-104")
@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer first-key", 200),
        ("bearer  first-key", 200),
        ("Bearer schlüssel", 200),
        (None, 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer first-ke", 401),
        ("Bearer first-keyy", 401),
        ("Basic first-key", 401),
        ("first-key", 401),
    ],
)
async def test_v1_wants_one_of_the_keys(authorization: str | None, status: int) -> None:
    headers = {} if authorization is None else {b"authorization": authorization.encode()}
    engine = FakeEngine()
    async with open_client(engine, SETTINGS) as client:
        for path in ("/v1/models", "/v1/models/example/fake-image"):
            assert (await client.get(path, headers=headers)).status_code == status
        response = await client.post(
            "/v1/images/generations", headers=headers, json={"prompt": "x"}
        )
    assert response.status_code == status
    assert len(engine.calls) == (status == 200)
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]


async def test_probes_stay_open_and_unknown_v1_routes_do_not() -> None:
    async with open_client(FakeEngine(), SETTINGS) as client:
        for path in ("/", "/health", "/ready", "/metrics", "/version", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1", "/v1/", "/v1/nothing"):
            assert (await client.get(path)).status_code == 401


def test_an_empty_key_is_refused_at_start() -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        ApiSettings(api_keys=("good", ""))


@pytest.mark.invariant("ENTRY-INV-104")
@pytest.mark.parametrize(("key", "let_in"), [(b"Bearer good", True), (b"Bearer bad", False)])
async def test_websockets_want_a_key_too(key: bytes, let_in: bool) -> None:
    entered: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.append(scope["path"])

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [(b"authorization", key)]}
    await AuthMiddleware(app, api_keys=("good",))(scope, receive, send)
    assert bool(entered) is let_in
    assert bool(sent) is not let_in
