"""GET routes that answer HEAD too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def answers_get(router: APIRouter, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Register for GET, and for HEAD, which the schema leaves out."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.add_api_route(path, endpoint, methods=["GET"], **options)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
        return endpoint

    return register
