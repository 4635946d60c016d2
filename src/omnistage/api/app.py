"""The HTTP application: routes, middleware, and what they share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI

from omnistage import __version__
from omnistage.api.context import AppContext
from omnistage.api.errors import install_error_handlers
from omnistage.api.lifecycle import Lifecycle
from omnistage.api.media import PictureSource
from omnistage.api.media_audio import AudioSource
from omnistage.api.media_bytes import FileSource
from omnistage.api.media_fetch import MediaFetcher
from omnistage.api.media_video import VideoSource
from omnistage.api.middleware.auth import AuthMiddleware
from omnistage.api.middleware.body_limit import BodyLimitMiddleware
from omnistage.api.middleware.request_scope import RequestScopeMiddleware
from omnistage.api.openapi import BEARER, ERROR_RESPONSES, install_openapi
from omnistage.api.protocol.chat import ChatRequest
from omnistage.api.protocol.chat_text import TextChatRequest
from omnistage.api.protocol.completions import CompletionRequest
from omnistage.api.protocol.images import (
    ImageCompletedEvent,
    ImageGenerationRequest,
    ImagePartialEvent,
)
from omnistage.api.protocol.responses import ResponsesRequest
from omnistage.api.protocol.speech import SpeechAudioDelta, SpeechAudioDone, SpeechRequest
from omnistage.api.protocol.tokens import DetokenizeRequest, TokenizeRequest
from omnistage.api.routes import (
    audio,
    chat,
    chat_text,
    completions,
    images,
    models,
    operations,
    responses,
    tokens,
)
from omnistage.api.settings import ApiSettings
from omnistage.api.text.checks import writes_text
from omnistage.api.text.template import TemplateSource
from omnistage.api.workers import MediaWorkers

if TYPE_CHECKING:
    from omnistage.engine.async_omni import AsyncOmni


def create_app(
    engine: AsyncOmni,
    settings: ApiSettings,
    *,
    lifecycle: Lifecycle | None = None,
    fetcher: MediaFetcher | None = None,
) -> FastAPI:
    """An ASGI application over a started engine (or, with a `lifecycle`, one that is starting).

    The engine stays the caller's: nothing here starts, drains or ends it.
    """
    workers = MediaWorkers(threads=settings.media_threads, max_pending=settings.max_pending_decodes)

    files = FileSource(settings, workers, fetcher or MediaFetcher(settings))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        workers.close()

    app = FastAPI(
        title="OmniStage", version=__version__, lifespan=lifespan, responses=ERROR_RESPONSES
    )
    app.state.created_unix_s = int(time.time())
    app.state.context = AppContext(
        engine=engine,
        settings=settings,
        workers=workers,
        pictures=PictureSource(settings, workers, files),
        sounds=AudioSource(settings, workers, files),
        videos=VideoSource(settings, workers, files),
        template=TemplateSource(Path(engine.config.model_path), workers),
        lifecycle=lifecycle or Lifecycle(),
    )
    app.include_router(operations.router)
    writes = writes_text(engine.config)
    chats = chat_text if writes else chat
    texts = (completions.router, responses.router, tokens.router)
    for router in (images.router, chats.router, *texts, audio.router, models.router):
        app.include_router(router, dependencies=[BEARER] if settings.api_keys else [])
    install_error_handlers(app)
    install_openapi(
        app,
        [
            ImageGenerationRequest,
            TextChatRequest if writes else ChatRequest,
            CompletionRequest,
            ResponsesRequest,
            TokenizeRequest,
            DetokenizeRequest,
            ImagePartialEvent,
            ImageCompletedEvent,
            SpeechRequest,
            SpeechAudioDelta,
            SpeechAudioDone,
        ],
    )
    app.add_middleware(BodyLimitMiddleware, settings=settings)
    app.add_middleware(AuthMiddleware, api_keys=settings.api_keys)
    app.add_middleware(RequestScopeMiddleware, metrics=engine.metrics)
    return app
