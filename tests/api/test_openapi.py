from __future__ import annotations

from typing import Any

import httpx
import pytest

from omnistage.api.protocol.images import ImageCompletedEvent, ImagePartialEvent
from omnistage.api.settings import ApiSettings
from tests.api.conftest import open_client
from tests.api.fake_engine import FakeEngine

POSTS = ("/v1/images/generations", "/v1/images/edits", "/v1/chat/completions")


@pytest.fixture
async def document(client: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.get("/openapi.json")).json()
    return answer


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


@pytest.mark.invariant("ENTRY-INV-300")
def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names
    assert names <= set(schemas)


@pytest.mark.invariant("ENTRY-INV-300")
def test_bodies_are_closed_and_describe_every_field(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in ("ImageGenerationRequest", "ChatRequest"):
        assert schemas[name]["additionalProperties"] is False
    assert {"prompt", "n", "size", "seed", "true_cfg_scale"} <= set(
        schemas["ImageGenerationRequest"]["properties"]
    )
    form = document["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    properties = form["multipart/form-data"]["schema"]["properties"]
    assert {"prompt", "image", "image[]", "mask"} <= set(properties)


@pytest.mark.invariant("ENTRY-INV-300")
def test_routes_declare_their_errors(document: dict[str, Any]) -> None:
    for path in POSTS:
        operation = document["paths"][path]["post"]
        assert {"200", "4XX", "5XX"} == set(operation["responses"])
        assert operation["requestBody"]["required"] is True
    assert "head" not in document["paths"]["/health"]
    assert "503" in document["paths"]["/health"]["get"]["responses"]


@pytest.mark.invariant("ENTRY-INV-300")
def test_streams_and_their_events_are_described(document: dict[str, Any]) -> None:
    for path in POSTS:
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
    schemas = document["components"]["schemas"]
    for event in (ImagePartialEvent, ImageCompletedEvent):
        described = schemas[event.__name__]
        assert described["additionalProperties"] is False
        assert set(described["required"]) == set(event.model_fields)


@pytest.mark.parametrize("keys", [(), ("key",)])
async def test_a_key_is_declared_where_one_is_wanted(keys: tuple[str, ...]) -> None:
    async with open_client(FakeEngine(), ApiSettings(api_keys=keys)) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    for path in (*POSTS, "/v1/models"):
        for operation in paths[path].values():
            assert ("security" in operation) == bool(keys)
    assert "security" not in paths["/health"]["get"]
