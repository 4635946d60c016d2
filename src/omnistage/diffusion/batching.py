"""Several requests in one command: how their data is packed, and which of them may share a call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

from omnistage.contracts.errors import ErrorRecord, OmniError, from_record
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniDiffusionSamplingParams

_INDIVIDUAL = ("seed", "partial_images")
_SHAPE = ("height", "width", "num_frames")


class Unshared:
    """The key of a request that shares a call with nobody: equal to itself only."""


def pack(parts: Sequence[StageData | OmniError]) -> StageData:
    """One payload for all: the field "parts" holds each one's fields, or its "error"; tensor
    "x" of part i becomes "i.x"."""
    fields: list[dict[str, Any]] = []
    tensors: dict[str, Any] = {}
    for index, part in enumerate(parts):
        if isinstance(part, OmniError):
            fields.append({"error": msgspec.to_builtins(part.to_record())})
            continue
        fields.append({"modality": part.modality.value, "fields": part.fields})
        tensors |= {f"{index}.{name}": value for name, value in part.tensors.items()}
    return StageData(modality=Modality.IMAGE, fields={"parts": fields}, tensors=tensors)


def unpack(data: StageData) -> list[StageData | OmniError]:
    """What `pack` was given, in order."""
    tensors: dict[int, dict[str, Any]] = {}
    for name, value in data.tensors.items():
        index, _, own_name = name.partition(".")
        tensors.setdefault(int(index), {})[own_name] = value
    return [_part(fields, tensors.get(i, {})) for i, fields in enumerate(data.fields["parts"])]


def _part(packed: dict[str, Any], tensors: dict[str, Any]) -> StageData | OmniError:
    if "error" in packed:
        return from_record(msgspec.convert(packed["error"], ErrorRecord))
    modality = Modality(packed["modality"])
    return StageData(modality=modality, fields=packed["fields"], tensors=tensors)


def call_key(params: OmniDiffusionSamplingParams, data: StageData) -> Hashable:
    """Equal for requests that one call of the pipeline can serve: all that differs is the prompt,
    the negative prompt and the seed. Requests with pictures or arrays of their own, or with a
    generator on the device, share a call with none."""
    if data.tensors or _has_arrays(params) or params.generator_device not in (None, "cpu"):
        return Unshared()
    shared = msgspec.structs.replace(params, **dict.fromkeys(_INDIVIDUAL))
    guided = data.fields.get("negative_prompt") is not None
    return (msgspec.json.encode(shared, order="deterministic"), guided)


def shape_key(params: OmniDiffusionSamplingParams, data: StageData) -> Hashable:
    """Equal for requests that can be expected to share denoising steps: what they make has one
    size, and so have the pictures they bring. Steps, guidance, prompts, seeds and the number of
    outputs may differ."""
    pictures = tuple((name, tuple(value.shape)) for name, value in sorted(data.tensors.items()))
    return (*(getattr(params, name) for name in _SHAPE), pictures)


def _has_arrays(params: OmniDiffusionSamplingParams) -> bool:
    return any(getattr(params, name) is not None for name in params.TENSOR_FIELDS)
