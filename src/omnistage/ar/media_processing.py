"""One media item through the checkpoint's own processor: its token ids and its encoder's input."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.ar.media_inputs import Media, PreparedCache, resampled
from omnistage.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

TENSORS = {
    "image": ("pixel_values", "image_grid_thw"),
    "audio": ("input_features", "feature_attention_mask"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""What the encoder of a kind takes, as the processor names it."""

ROPE = ("image_grid_thw", "video_grid_thw", "video_second_per_grid", "audio_feature_lengths")
"""What positions follow from, one row an item."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProcessedMedia:
    """token_ids stand in the prompt in the place of the item's one placeholder; those of a video
    with sound hold its sound's too. `tensors` are the processor's, for this item alone."""

    token_ids: list[int]
    tensors: dict[str, torch.Tensor]


class MediaProcessor:
    """Wraps a checkpoint's processor. Items are processed one at a time, so that the result of one
    does not depend on what else a prompt holds (a joint call pads sounds to the longest), and kept
    by content."""

    def __init__(self, processor: Any, cache: PreparedCache) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self._cache = cache
        settings = processor.to_dict()
        self._settings = json.dumps(settings, sort_keys=True, default=str).encode()
        vision = processor.vision_bos_token, processor.vision_eos_token
        audio = processor.audio_bos_token, processor.audio_eos_token
        self._marks = {
            "image": (vision[0], processor.image_token, vision[1]),
            "audio": (audio[0], processor.audio_token, audio[1]),
            "video": (vision[0], processor.video_token, vision[1]),
        }
        self._rate_hz = int(processor.feature_extractor.sampling_rate)

    def placeholder(self, kind: str) -> str:
        return self._marks[kind][1]

    def digest(self, media: Media) -> bytes:
        return media.digest(self._settings)

    def process(self, media: Media, digest: bytes) -> ProcessedMedia:
        """Raises `InvalidRequestError` where the processor refuses the item."""
        known = self._cache.get(digest)
        if known is None:
            known = self._processed(media)
            self._cache.put(digest, known)
        ids = known["token_ids"]
        tensors = {name: value for name, value in known.items() if name != "token_ids"}
        return ProcessedMedia(token_ids=ids.tolist(), tensors=tensors)

    def _processed(self, media: Media) -> dict[str, torch.Tensor]:
        import torch

        try:
            found = self.processor(
                text=["".join(self._marks[media.kind])],
                return_tensors="pt",
                **self._arguments(media),
            )
        except ValueError as error:
            raise InvalidRequestError(
                f"the model's processor refuses {media.name}: {error}"
            ) from error
        kinds = {media.kind} | ({"audio"} if media.sound is not None else set())
        result = {name: found[name] for kind in kinds for name in TENSORS[kind]}
        result["token_ids"] = found["input_ids"][0, 1:-1]
        if media.kind == "video":
            seconds = torch.as_tensor(found["video_second_per_grid"], dtype=torch.float32)
            result["video_second_per_grid"] = seconds.reshape(-1)
        if "audio" in kinds:
            result["audio_feature_lengths"] = found["feature_attention_mask"].sum(-1)
        return result

    def _arguments(self, media: Media) -> dict[str, Any]:
        if media.kind == "image":
            return {"images": [media.array]}
        if media.kind == "audio":
            return {"audio": [resampled(media, self._rate_hz)]}
        # Frames were chosen when the video was decoded; the rate is theirs.
        arguments: dict[str, Any] = {
            "videos": [media.array],
            "videos_kwargs": {"fps": media.rate, "do_sample_frames": False},
        }
        if media.sound is not None:
            arguments["audio"] = [resampled(media.sound, self._rate_hz)]
            arguments |= self._sound_in_video()
        return arguments

    def _sound_in_video(self) -> dict[str, Any]:
        """transformers renamed it in 5.2x."""
        if hasattr(self.processor, "load_audio_from_video"):
            return {"load_audio_from_video": True, "audio_from_video_indices": [0]}
        return {"use_audio_in_video": True}
