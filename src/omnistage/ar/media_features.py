"""What a language model's encoders make of media, and how a step's positions take it up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from omnistage.ar.model import Chunk
    from omnistage.ar.prompt import MediaItem


class MediaFeatures(NamedTuple):
    """embeds (n, hidden_size) replace the embeddings of an item's n places; deepstack holds what
    the first decoder layers add there, each (n, hidden_size), for models that have it: pictures and
    videos only."""

    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()


def encode(module: Any, item: MediaItem) -> MediaFeatures:
    """Run the encoder of `module` for one item: `get_image_features`, `get_audio_features` and
    `get_video_features` as `transformers`' Qwen-Omni thinkers have them."""
    tensors = item.tensors
    device, dtype = module.device, module.dtype
    if item.kind == "audio":
        output = module.get_audio_features(
            tensors["input_features"].to(device),
            feature_attention_mask=tensors["feature_attention_mask"].to(device),
        )
        return MediaFeatures(output.last_hidden_state.to(dtype))
    if item.kind == "image":
        output = module.get_image_features(
            tensors["pixel_values"].to(device), tensors["image_grid_thw"].to(device)
        )
    else:
        output = module.get_video_features(
            tensors["pixel_values_videos"].to(device), tensors["video_grid_thw"].to(device)
        )
    deepstack = getattr(output, "deepstack_features", None) or ()
    layers = [_one(layer).to(dtype) for layer in deepstack]
    return MediaFeatures(_one(output.pooler_output).to(dtype), tuple(layers))


def _one(features: Any) -> torch.Tensor:
    """Of the single item that was encoded; some versions split by item, some do not."""
    if isinstance(features, (tuple, list)):
        (features,) = features
    tensor: torch.Tensor = features
    return tensor


def places(item: MediaItem) -> np.ndarray:
    """(n,) int64: the positions of an item's features, in order."""
    return np.concatenate([np.arange(first, last) for first, last in item.spans])


def scatter(chunks: Iterable[Chunk], embeds: torch.Tensor) -> dict[str, Any]:
    """Write the features of media into embeds (T, hidden_size) where chunks cover their places.

    Returns the decoder's deepstack arguments for exactly these positions; none where there are no
    pictures. A chunk may hold any part of an item.
    """
    import torch

    seen_at: list[np.ndarray] = []
    seen: list[tuple[torch.Tensor, ...]] = []
    for chunk in chunks:
        for index, item in enumerate(chunk.sequence.prompt.media):
            where = places(item)
            low, high = np.searchsorted(where, (chunk.start, chunk.start + chunk.count))
            if low == high:
                continue
            features: MediaFeatures = chunk.sequence.media[index]
            packed = where[low:high] - chunk.start + chunk.first
            target = torch.from_numpy(packed).to(embeds.device)
            embeds.index_copy_(0, target, features.embeds[low:high])
            if features.deepstack:
                seen_at.append(packed)
                seen.append(tuple(layer[low:high] for layer in features.deepstack))
    return _deepstack(seen_at, seen, embeds) if seen else {}


def _deepstack(
    seen_at: list[np.ndarray], seen: list[tuple[torch.Tensor, ...]], embeds: torch.Tensor
) -> dict[str, Any]:
    """The decoder adds row i of each layer's features at the i-th position of its mask."""
    import torch

    at = np.concatenate(seen_at)
    order = torch.from_numpy(np.argsort(at, kind="stable")).to(embeds.device)
    mask = torch.zeros(len(embeds), dtype=torch.bool)
    mask[torch.from_numpy(at)] = True
    return {
        "visual_pos_masks": mask.to(embeds.device).unsqueeze(0),
        "deepstack_visual_embeds": [torch.cat(layers)[order] for layers in zip(*seen, strict=True)],
    }
