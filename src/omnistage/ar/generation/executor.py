"""Decodes batches of codec frames; the audio leaves by the output thread."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage.ar.generation.codec import (
    BeginsWithInput,
    CodecModel,
    CodecModelFactory,
    CodecStream,
    TakesLong,
)
from omnistage.ar.generation.late_audio import send_audio
from omnistage.ar.generation.options import GenerationOptions
from omnistage.ar.generation.scheduler import DECODE, Piece
from omnistage.ar.imports import load_named
from omnistage.ar.payloads import HostCopier
from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OmniError,
    RequestCancelledError,
    StageLostError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, ExecutionContext, LoadReporter
from omnistage.platforms.registry import platform_of

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage

Row = tuple[RequestIdentity, Piece, "np.ndarray[Any, Any]", StageData | None]


class GenerationExecutor:
    """Holds one `CodecStream` for each stream that has begun, until its release."""

    def __init__(
        self, stage: ResolvedStage, options: GenerationOptions, rank: int, world_size: int
    ) -> None:
        if world_size > 1:
            raise UnsupportedCombinationError(
                f"a generation stage of {world_size} ranks is not there yet; use one device"
            )
        self._stage = stage
        self._options = options
        self._device = stage.devices[rank]
        self._copier = HostCopier(self._device)
        self._model: CodecModel | None = None
        self._streams: dict[RequestKey, CodecStream] = {}

    def load(self, report: LoadReporter) -> dict[str, Any]:
        """Raises `ConfigurationError` for an option codec_model that names nothing, and what the
        factory raises."""
        platform_of(self._device).adopt_stream(self._device, urgent=True)
        factory: CodecModelFactory = load_named("codec_model", self._options.codec_model)
        self._model = factory(self._stage, self._device, self._options.max_streams, report)
        return {"device": self._device, "dtype": self._stage.dtype, **self._model.describe()}

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        """Fields "frame_s" (seconds of audio in one frame) and "errors" by key: streams that
        fail by themselves. Audio is delivered later, in order."""
        if command.name != DECODE:
            raise InternalError(f"a generation stage cannot {command.name!r}")
        model = self._loaded()
        cancelled = context.checkpoint()
        pieces, codes = command.data.fields["pieces"], command.data.tensors["codes"]
        errors: dict[RequestKey, OmniError] = {}
        rows: list[Row] = []
        starts = command.data.fields["starts"]
        for identity, piece, ids, start in zip(
            command.identities, pieces, codes, starts, strict=True
        ):
            if identity.key in cancelled:
                continue
            if error := self._refusal(model, identity, piece, ids):
                errors[identity.key] = error
            else:
                rows.append((identity, piece, ids, start))
        if rows:
            self._decode(model, rows, context)
        frame_s = model.samples_per_frame / model.sample_rate
        return StageData(modality=Modality.AUDIO, fields={"frame_s": frame_s, "errors": errors})

    def release(self, key: RequestKey) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            self._loaded().release(stream)

    def control(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "executor_holds":
            return len(self._streams)
        raise InvalidRequestError(f"a generation stage has no control call {method!r}")

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
        self._model = None
        self._streams.clear()

    def _refusal(
        self, model: CodecModel, identity: RequestIdentity, piece: Piece, ids: np.ndarray[Any, Any]
    ) -> OmniError | None:
        """Ids outside of the codebook would read other memory, or stop a GPU for everyone."""
        known = self._streams.get(identity.key)
        had = known.frames if known is not None else 0
        if piece.start not in (0, had):
            return InternalError(
                f"{identity} has decoded {had} frames and would go on at {piece.start}"
            )
        real = ids[: piece.frames]
        if real.size and real.shape[1] != model.num_codebooks:
            return InvalidRequestError(
                f"codes have {real.shape[1]} codebooks; this codec has {model.num_codebooks}"
            )
        if real.size and (real.min() < 0 or real.max() >= model.codebook_size):
            return InvalidRequestError(
                f"codes from {real.min()} to {real.max()}; allowed are 0 to "
                f"{model.codebook_size - 1}"
            )
        return None

    def _decode(self, model: CodecModel, rows: list[Row], context: ExecutionContext) -> None:
        import torch

        if isinstance(model, TakesLong):
            model.between = partial(_stop_without_listeners, context, rows)
        streams = [self._stream(model, row[0], row[1], row[3]) for row in rows]
        frames = [piece.frames for _, piece, _, _ in rows]
        waves = [torch.empty(0, device=self._device)] * len(rows)
        try:
            if longest := max(frames):
                size = next((size for size in model.captured_sizes if size >= longest), longest)
                ids = np.zeros((len(rows), size, model.num_codebooks), dtype=np.int64)
                ids[:, :longest] = [ids[:longest] for _, _, ids, _ in rows]
                codes = torch.from_numpy(ids).to(self._device, non_blocking=True)
                waves = model.decode(streams, codes, frames)
            for index, (_, piece, _, _) in enumerate(rows):
                if piece.final:
                    tail = model.finish(streams[index])
                    if tail.numel():
                        waves[index] = torch.cat((waves[index], tail))
        except Exception as error:
            if type(error).__name__ == "AcceleratorError":
                raise StageLostError("a device of this stage failed; please retry") from error
            raise
        identities = [identity for identity, _, _, _ in rows]
        send_audio(self._copier, context, identities, waves, model.sample_rate)

    def _stream(
        self, model: CodecModel, identity: RequestIdentity, piece: Piece, start: StageData | None
    ) -> CodecStream:
        key = identity.key
        if piece.start == 0:
            self.release(key)
        if key not in self._streams:
            if isinstance(model, BeginsWithInput) and start is not None:
                self._streams[key] = model.begin_with(key, start)
            else:
                self._streams[key] = model.begin(key)
        return self._streams[key]

    def _loaded(self) -> CodecModel:
        if self._model is None:
            raise InternalError("the generation stage has not loaded its model, or is closed")
        return self._model


def _stop_without_listeners(context: ExecutionContext, rows: list[Row]) -> None:
    """Mark liveness; raises `RequestCancelledError` once nobody wants any of the audio."""
    cancelled = context.checkpoint()
    if all(row[0].key in cancelled for row in rows):
        raise RequestCancelledError("nobody listens any more")
