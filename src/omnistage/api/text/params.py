"""From the fields of a text request to one set of sampling parameters a stage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from omnistage.api.protocol.sampling import SamplingKnobs
from omnistage.config.pipeline import ExecutionType
from omnistage.config.resolve import PARAMS_BY_EXECUTION
from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.sampling import (
    OmniTokenSamplingParams,
    SamplingParams,
    StructuredOutput,
)

_SAME_NAME = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWishes:
    """What a request asks of the stage that writes its text, beside `knobs`. `structured` is what
    the request's format or forced tool demands."""

    knobs: SamplingKnobs
    max_tokens: int | None = None
    logprobs: int | None = None
    structured: StructuredOutput | None = None
    stream: bool = False
    voice: str | None = None


def text_stage(config: OmniConfig) -> int:
    """The stage that writes the text a caller gets."""
    for stage in config.pipeline.stages:
        if stage.final_output and stage.output_modality is Modality.TEXT:
            return stage.stage_id
    raise InvalidRequestError(f"model {config.served_model_name!r} writes no text", param="model")


def params_by_stage(config: OmniConfig, wishes: TokenWishes) -> list[SamplingParams]:
    """The request's knobs go to the stage that writes text; the others take its seed, whether its
    output streams, and the voice. Raises `InvalidRequestError` that names the field."""
    result = _given(config, wishes.knobs.sampling_params_list)
    writer = text_stage(config)
    for index, params in enumerate(result):
        if not isinstance(params, OmniTokenSamplingParams):
            continue
        changes = _changes(wishes) if index == writer else _shared(wishes, params)
        result[index] = msgspec.structs.replace(params, **changes)
    if not isinstance(result[writer], OmniTokenSamplingParams):
        raise InvalidRequestError("this model's text takes no sampling parameters", param="model")
    return result


def _given(config: OmniConfig, given: list[dict[str, Any]] | None) -> list[SamplingParams]:
    kinds = [PARAMS_BY_EXECUTION[ExecutionType(s.stage.execution_type)] for s in config.stages]
    if given is None:
        return [kind() for kind in kinds]
    where = "sampling_params_list"
    if len(given) != len(kinds):
        raise InvalidRequestError(
            f"{where} has {len(given)} entries, the model {len(kinds)} stages", param=where
        )
    pairs = enumerate(zip(given, kinds, strict=True))
    return [_convert(one, kind, f"{where}[{i}]") for i, (one, kind) in pairs]


def _convert(value: dict[str, Any], kind: type[SamplingParams], where: str) -> SamplingParams:
    try:
        return msgspec.convert({"type": kind.__struct_config__.tag, **value}, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "'")
        raise InvalidRequestError(f"{where}: {text}", param=where) from error


def _shared(wishes: TokenWishes, params: OmniTokenSamplingParams) -> dict[str, Any]:
    changes: dict[str, Any] = {"delta": wishes.stream}
    if wishes.knobs.seed is not None and params.seed is None:
        changes["seed"] = wishes.knobs.seed
    if wishes.voice is not None:
        changes["extra_args"] = {**params.extra_args, "voice": wishes.voice}
    return changes


def _changes(wishes: TokenWishes) -> dict[str, Any]:
    knobs = wishes.knobs
    changes = {n: getattr(knobs, n) for n in _SAME_NAME if getattr(knobs, n) is not None}
    if wishes.max_tokens is not None:
        changes["max_tokens"] = wishes.max_tokens
    if knobs.stop is not None:
        changes["stop"] = [knobs.stop] if isinstance(knobs.stop, str) else list(knobs.stop)
    if knobs.logit_bias is not None:
        changes["logit_bias"] = {int(token): bias for token, bias in knobs.logit_bias.items()}
    if wishes.logprobs is not None:
        changes["logprobs"] = wishes.logprobs
    structured = _structured(knobs, wishes.structured)
    if structured is not None:
        changes["structured"] = structured
    changes["delta"] = wishes.stream
    _check_lengths(changes)
    return changes


def _check_lengths(changes: Mapping[str, Any]) -> None:
    least, most = changes.get("min_tokens", 0), changes.get("max_tokens")
    if most is not None and least > most:
        raise UnsupportedCombinationError(
            f"min_tokens {least} is over max_tokens {most}; lower it", param="min_tokens"
        )


def _structured(knobs: SamplingKnobs, demanded: StructuredOutput | None) -> StructuredOutput | None:
    """The one thing that the text must be, whichever field says so."""
    found: list[tuple[str, StructuredOutput]] = []
    if demanded is not None:
        found.append(("response_format or tool_choice", demanded))
    if knobs.guided_json is not None:
        found.append(("guided_json", StructuredOutput(json_schema=schema_text(knobs.guided_json))))
    if knobs.guided_regex is not None:
        found.append(("guided_regex", StructuredOutput(regex=knobs.guided_regex)))
    if knobs.guided_grammar is not None:
        found.append(("guided_grammar", StructuredOutput(grammar=knobs.guided_grammar)))
    if knobs.guided_choice is not None:
        found.append(("guided_choice", StructuredOutput(choice=knobs.guided_choice)))
    found += [("structured_outputs", one) for one in _of_structured_outputs(knobs)]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise UnsupportedCombinationError(
            f"{names} cannot all hold for one text; give one", param=found[-1][0].split(" ")[0]
        )
    return found[0][1] if found else None


def _of_structured_outputs(knobs: SamplingKnobs) -> list[StructuredOutput]:
    given = knobs.structured_outputs
    if given is None:
        return []
    found = []
    if given.json_ is not None:
        found.append(StructuredOutput(json_schema=schema_text(given.json_)))
    if given.json_object:
        found.append(StructuredOutput(json_object=True))
    if given.regex is not None:
        found.append(StructuredOutput(regex=given.regex))
    if given.grammar is not None:
        found.append(StructuredOutput(grammar=given.grammar))
    if given.choice is not None:
        found.append(StructuredOutput(choice=given.choice))
    if len(found) != 1:
        raise UnsupportedCombinationError(
            f"structured_outputs says {len(found)} things; give exactly one of json, json_object, "
            "regex, grammar, choice",
            param="structured_outputs",
        )
    return found


def schema_text(schema: Mapping[str, Any] | str) -> str:
    """A JSON schema as text. Raises `InvalidRequestError` for text that is no JSON."""
    if not isinstance(schema, str):
        return json.dumps(schema)
    try:
        json.loads(schema)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON schema is no JSON: {error}") from error
    return schema
