"""From what a caller passes to a request the orchestrator can route. Validation happens here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any

import msgspec
import numpy as np

from omnistage.config.checks import suggestion
from omnistage.config.pipeline import ENTRY, PipelineConfig
from omnistage.config.resolve import PARAMS_BY_EXECUTION
from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.identity import RequestIdentity, new_request_id
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.requests import OmniRequest, PromptLike
from omnistage.contracts.sampling import (
    OmniDiffusionSamplingParams,
    SamplingParams,
    merge_defaults,
)
from omnistage.engine.request_state import Child
from omnistage.stages.imports import load_object

_PROMPT_KEYS = ("prompt", "negative_prompt", "multi_modal_data")
_MEDIA_KEYS = ("image", "mask")


def make_request(
    config: OmniConfig,
    prompt: PromptLike | StageData,
    sampling_params: SamplingParams | None,
    *,
    request_id: str | None = None,
    sampling_params_list: Sequence[SamplingParams] | None = None,
    output_modalities: Sequence[str] | None = None,
    priority: int = 0,
    timeout_s: float | None = None,
    trace_context: str | None = None,
    streaming_input: bool = False,
    num_children: int = 1,
) -> OmniRequest:
    """Raises `InvalidRequestError` that names the offending argument."""
    _check_type("request_id", request_id, str)
    _check_type("trace_context", trace_context, str)
    _check_type("timeout_s", timeout_s, int | float)
    _check_type("priority", priority, int)
    _check_type("n", num_children, int)
    inputs = prompt if isinstance(prompt, StageData) else prompt_data(prompt)
    params = stage_params(config, sampling_params, sampling_params_list)
    params = _tensors_to_inputs(params, inputs)
    limit_s = timeout_s if timeout_s is not None else config.limits.request_timeout_s
    if not 0 < limit_s < math.inf:
        raise InvalidRequestError(
            f"timeout_s is {limit_s}; it must be a positive number of seconds", param="timeout_s"
        )
    if num_children < 1:
        raise InvalidRequestError(f"n is {num_children}; it must be at least 1", param="n")
    return OmniRequest(
        identity=RequestIdentity(
            request_id=request_id or new_request_id(),
            priority=priority,
            deadline_unix_s=time.time() + limit_s,
            trace_context=trace_context,
        ),
        inputs=inputs,
        sampling_params=params,
        output_modalities=_modalities(config.pipeline, output_modalities),
        streaming_input=streaming_input,
        num_children=num_children,
        prompt=None if isinstance(prompt, StageData) else prompt,
    )


def _check_type(name: str, value: object, allowed: type | UnionType) -> None:
    """None is always allowed; True and False are no numbers here."""
    if value is None or (isinstance(value, allowed) and not isinstance(value, bool)):
        return
    kind = allowed.__name__ if isinstance(allowed, type) else "number"
    raise InvalidRequestError(
        f"{name} must be of type {kind}, got {type(value).__name__}", param=name
    )


def prompt_data(prompt: PromptLike) -> StageData:
    """A prompt as the first payload: fields "prompt" and "negative_prompt", tensors "image_0" …
    and "mask_0" … as uint8 (height, width, channels)."""
    if isinstance(prompt, str):
        return StageData(modality=Modality.TEXT, fields={"prompt": prompt})
    if not isinstance(prompt, dict):
        raise InvalidRequestError(
            f"a prompt is a string or a dictionary, not {type(prompt).__name__}", param="prompt"
        )
    _known(dict(prompt), _PROMPT_KEYS, "prompt key")
    fields = {
        key: prompt[key] for key in ("prompt", "negative_prompt") if prompt.get(key) is not None
    }
    for key, value in fields.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{key} must be a string", param=key)
    media = prompt.get("multi_modal_data") or {}
    _known(media, _MEDIA_KEYS, "multi_modal_data key")
    tensors: dict[str, Any] = {}
    for kind, value in media.items():
        items = value if isinstance(value, list | tuple) else [value]
        tensors |= {f"{kind}_{i}": _pixels(item, kind) for i, item in enumerate(items)}
    modality = Modality.IMAGE if tensors else Modality.TEXT
    return StageData(modality=modality, fields=fields, tensors=tensors)


def _known(given: dict[str, Any], allowed: Sequence[str], what: str) -> None:
    for key in given:
        if key not in allowed:
            raise InvalidRequestError(
                f"unknown {what} {key!r}; {suggestion(str(key), allowed)}", param=str(key)
            )


def _pixels(item: Any, kind: str) -> np.ndarray:
    """A PIL image or an array as uint8 (height, width, channels); a mask may have one channel."""
    if not isinstance(item, np.ndarray):
        if not hasattr(item, "convert"):
            raise InvalidRequestError(
                f"{kind} must be a PIL image or a uint8 array, not {type(item).__name__}",
                param=kind,
            )
        if kind == "mask":
            item = item.convert("L")
        elif item.mode not in ("RGB", "RGBA"):
            item = item.convert("RGB")
        item = np.asarray(item)
    if item.ndim == 2:
        item = item[:, :, None]
    if item.dtype != np.uint8 or item.ndim != 3 or item.shape[2] not in (1, 3, 4):
        raise InvalidRequestError(
            f"{kind} must be uint8 of shape (height, width, 1, 3 or 4), got {item.dtype} "
            f"{item.shape}",
            param=kind,
        )
    return np.ascontiguousarray(item)


def stage_params(
    config: OmniConfig,
    single: SamplingParams | None,
    by_stage: Sequence[SamplingParams] | None,
) -> tuple[SamplingParams, ...]:
    """One set of parameters a stage, with the deployment's defaults filled in.

    `single` goes to every stage whose kind takes it. Raises `InvalidRequestError` when a list has
    the wrong length or a stage gets parameters of another kind.
    """
    stages = config.stages
    if by_stage is not None:
        if single is not None:
            raise InvalidRequestError("give sampling_params or sampling_params_list, not both")
        if len(by_stage) != len(stages):
            raise InvalidRequestError(
                f"sampling_params_list has {len(by_stage)} entries, the model {len(stages)} stages",
                param="sampling_params_list",
            )
    kinds = [PARAMS_BY_EXECUTION[stage.stage.execution_type] for stage in stages]
    if single is not None and not any(isinstance(single, kind) for kind in kinds):
        wanted = " or ".join(sorted({kind.__name__ for kind in kinds}))
        raise InvalidRequestError(
            f"this model takes {wanted}, not {type(single).__name__}", param="sampling_params"
        )
    result: list[SamplingParams] = []
    for index, (stage, kind) in enumerate(zip(stages, kinds, strict=True)):
        params: SamplingParams
        if by_stage is not None:
            params = by_stage[index]
            if not isinstance(params, kind):
                raise InvalidRequestError(
                    f"stage {index} ({stage.name}) takes {kind.__name__}, not "
                    f"{type(params).__name__}",
                    param="sampling_params_list",
                )
        else:
            params = single if isinstance(single, kind) else kind()
        result.append(merge_defaults(params, stage.default_sampling_params))
    return tuple(result)


def _tensors_to_inputs(
    params: tuple[SamplingParams, ...], inputs: StageData
) -> tuple[SamplingParams, ...]:
    """Tensors travel in the payload, not among the plain values."""
    result: list[SamplingParams] = []
    for one in params:
        if isinstance(one, OmniDiffusionSamplingParams):
            given = {n: getattr(one, n) for n in one.TENSOR_FIELDS if getattr(one, n) is not None}
            inputs.tensors |= given
            one = msgspec.structs.replace(one, **dict.fromkeys(given))
        result.append(one)
    return tuple(result)


def _modalities(
    pipeline: PipelineConfig, wanted: Sequence[str] | None
) -> frozenset[Modality] | None:
    if wanted is None:
        return None
    available = {str(s.output_modality) for s in pipeline.stages if s.final_output}
    for name in wanted:
        if name not in available:
            raise InvalidRequestError(
                f"this model has no {name!r} output; available: {', '.join(sorted(available))}",
                param="modalities",
            )
    return frozenset(Modality(name) for name in wanted)


def needed_stages(pipeline: PipelineConfig, wanted: frozenset[Modality] | None) -> frozenset[int]:
    """The final stages whose output is wanted, and everything that they read from."""
    pending = [
        stage.stage_id
        for stage in pipeline.stages
        if stage.final_output and (wanted is None or stage.output_modality in wanted)
    ]
    needed: set[int] = set()
    while pending:
        stage_id = pending.pop()
        if stage_id not in needed and stage_id != ENTRY:
            needed.add(stage_id)
            pending.extend(pipeline.stages[stage_id].input_sources)
    return frozenset(needed)


def make_children(pipeline: PipelineConfig, request: OmniRequest) -> dict[int, Child]:
    """The request's children: `num_children` groups, each with its companions.

    A companion shares its main child's replicas. Child i of several draws from `seed + i`.
    """
    expand: Callable[..., Any] | None = None
    for stage in pipeline.consumers(ENTRY):
        expand = load_object(stage.prompt_expand) if stage.prompt_expand else expand
    companions = expand(request.inputs, request.sampling_params) if expand else []
    children: dict[int, Child] = {}
    for group in range(request.num_children):
        main = _add_child(children, request, request.inputs, "main", group)
        for role, data in companions:
            _add_child(children, request, data, role, group).prefer = main.key
    return children


def _add_child(
    children: dict[int, Child], request: OmniRequest, data: StageData, role: str, group: int
) -> Child:
    index = len(children)
    child = Child(identity=request.identity.child(index, role), inputs=data, group=group)
    children[index] = child
    return child
