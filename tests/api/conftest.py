"""A fake engine, and a client that talks to the application without a socket."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from omnistage.api.app import create_app
from omnistage.api.settings import ApiSettings
from tests.api.fake_engine import FakeEngine

OpenClient = Callable[..., Any]


@asynccontextmanager
async def open_client(
    engine: FakeEngine, settings: ApiSettings | None = None, **app_options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, settings or ApiSettings(), **app_options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


@pytest.fixture(autouse=True)
def logs_reach_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test before this one configured."""
    monkeypatch.setattr(logging.getLogger("omnistage"), "propagate", True)


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(engine) as opened:
        yield opened
