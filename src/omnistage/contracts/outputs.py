"""What a caller gets back. Internal objects end here; the server renders these."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import OmniError
from omnistage.contracts.modalities import Modality

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

PARTIAL_IMAGE_INDEX = "partial_image_index"
"""The field that marks a stage's partial output as a preview."""


class FinishReason(StrEnum):
    """How a request ended. Exactly one of them, exactly once."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True)
class OmniProgress:
    """`step` of `total_steps` of stage `stage_id` is done."""

    stage_id: int
    step: int
    total_steps: int


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer, or, in an event of a stream, what that event adds to it.

    `logprobs` has one entry a token: "token_id", "token", "bytes", "logprob", "rank" and "top", the
    most likely ones in the same shape. `audio` is float32 (n,) at `sample_rate` samples a second.
    `stop_reason` is the stop string or the id of the stop token that ended the text.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    audio: np.ndarray | None = None
    sample_rate: int | None = None

    @property
    def multimodal_output(self) -> dict[str, Any]:
        """What is not text: "audio" and "sr"."""
        return {} if self.audio is None else {"audio": self.audio, "sr": self.sample_rate}


@dataclass(slots=True, kw_only=True)
class OmniRequestOutput:
    """One event of a request's stream, or, from `Omni.generate`, its whole result.

    `finished` marks the terminal event; `partial` data that a later event continues or replaces.
    `images` are PIL images (uint8), `tensors` arrays by name (float32 (n, height, width, 3) under
    "images" for `output_type` "np", (n, 3, height, width) for "pt", latents for "latent").
    `outputs` has one entry an answer (`n`) of text or sound; `text`, `audio` and `sample_rate` are
    those of the first. `stage_durations` maps stage name to seconds. On failure `error` is set and
    nothing else is.
    """

    request_id: str
    prompt: Any = None
    stage_id: int | None = None
    replica_id: int | None = None
    child_index: int = 0
    output_index: int = 0
    modality: Modality | None = None
    partial: bool = False
    finished: bool = False
    finish_reason: FinishReason | None = None
    images: list[Image] = field(default_factory=list)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    text: str | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    progress: OmniProgress | None = None
    stage_durations: dict[str, float] = field(default_factory=dict)
    peak_memory_mb: float | None = None
    error: OmniError | None = None

    @property
    def is_preview(self) -> bool:
        """Whether these are unfinished pictures, which the final ones replace; `fields` hold
        "partial_image_index", "step" and "total_steps"."""
        return self.partial and PARTIAL_IMAGE_INDEX in self.fields

    @property
    def audio(self) -> np.ndarray | None:
        """float32 (n,)."""
        return self.outputs[0].audio if self.outputs else None

    @property
    def sample_rate(self) -> int | None:
        return self.outputs[0].sample_rate if self.outputs else None

    @property
    def multimodal_output(self) -> dict[str, Any]:
        return self.outputs[0].multimodal_output if self.outputs else {}

    @property
    def error_status_code(self) -> int | None:
        return self.error.status if self.error else None

    @property
    def error_type(self) -> str | None:
        return self.error.type if self.error else None
