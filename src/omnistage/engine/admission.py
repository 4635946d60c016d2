"""From what a caller passes to a request the orchestrator can route. Validation happens here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any

import msgspec

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
    OmniTokenSamplingParams,
    SamplingParams,
    merge_defaults,
)
from omnistage.engine.prompts import MODALITIES, as_dictionary, prompt_data
from omnistage.engine.request_state import Child
from omnistage.engine.stage_checks import check_stage_params
from omnistage.stages.imports import load_object

OUTPUT_MODALITIES = "output_modalities"
"""The field of a prompt's payload that names the wanted outputs."""


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
    delta: bool = True,
) -> OmniRequest:
    """`delta` False: token stages need not hand out what they write before it is complete.

    Raises `InvalidRequestError` that names the offending argument.
    """
    _check_type("request_id", request_id, str)
    _check_type("trace_context", trace_context, str)
    _check_type("timeout_s", timeout_s, int | float)
    _check_type("priority", priority, int)
    _check_type("n", num_children, int)
    if output_modalities is None and not isinstance(prompt, StageData):
        output_modalities = _wanted(as_dictionary(prompt).get(MODALITIES))
    modalities = _modalities(config.pipeline, output_modalities)
    if isinstance(prompt, StageData):
        inputs = prompt
    else:
        inputs = prompt_data(prompt)
        inputs.fields[OUTPUT_MODALITIES] = _names(config.pipeline, modalities)
    params = stage_params(config, sampling_params, sampling_params_list)
    params = _tensors_to_inputs(params, inputs)
    if not delta:
        params = tuple(_in_one_piece(one) for one in params)
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
        output_modalities=modalities,
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
        params = merge_defaults(params, stage.default_sampling_params)
        check_stage_params(stage, params)
        result.append(params)
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


def _wanted(value: object) -> list[str] | None:
    """What a prompt's own "modalities" say."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise InvalidRequestError(
            f"modalities must be a list of names, got {value!r}", param="modalities"
        )
    return list(value)


def _names(pipeline: PipelineConfig, wanted: frozenset[Modality] | None) -> list[str]:
    """Of the outputs that are made for the caller: a stage learns what others need of it."""
    made = {s.output_modality for s in pipeline.stages if s.final_output}
    return sorted(str(one) for one in (made if wanted is None else wanted))


def _in_one_piece(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, OmniTokenSamplingParams):
        return params
    return msgspec.structs.replace(params, delta=False)


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
