"""What every route needs, held once on `app.state`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from omnistage.api.lifecycle import Lifecycle
from omnistage.api.media import PictureSource
from omnistage.api.media_audio import AudioSource
from omnistage.api.media_video import VideoSource
from omnistage.api.settings import ApiSettings
from omnistage.api.text.template import TemplateSource
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InvalidRequestError, NotFoundError
from omnistage.contracts.modalities import Modality

if TYPE_CHECKING:
    from omnistage.engine.async_omni import AsyncOmni


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    engine: AsyncOmni
    settings: ApiSettings
    workers: MediaWorkers
    pictures: PictureSource
    sounds: AudioSource
    videos: VideoSource
    template: TemplateSource
    lifecycle: Lifecycle = field(default_factory=Lifecycle)

    @property
    def model_name(self) -> str:
        return self.engine.config.served_model_name

    def check_model(self, name: str | None) -> None:
        """Raises `NotFoundError` when a request names a model that is not served."""
        if name not in (None, self.model_name, self.engine.config.model):
            raise NotFoundError(
                f"model {name!a} is not served here; available: {self.model_name!r}",
                param="model",
            )

    def check_makes_images(self) -> None:
        made = {s.output_modality for s in self.engine.config.pipeline.stages if s.final_output}
        if Modality.IMAGE not in made:
            raise InvalidRequestError(
                f"model {self.model_name!r} makes {', '.join(sorted(made))}, not images",
                param="model",
            )


def context_of(request: Request) -> AppContext:
    context: AppContext = request.app.state.context
    return context
