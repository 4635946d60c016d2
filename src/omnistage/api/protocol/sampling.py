"""What a text request may ask of the sampler: OpenAI's fields and vLLM's, with their bounds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from omnistage.api.protocol.base import MAX_SEED, NO_NUL, ApiModel, CleanText, by_json_type
from omnistage.contracts.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS

MAX_TOKEN_ID = 2**31 - 1
MAX_TEMPERATURE = 2.0
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(min_length=1, max_length=1024), NO_NUL]
StopStrings = by_json_type(
    "a string or a list of strings",
    text=StopString,
    items=Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)],
)
BiasedToken = Annotated[
    str,
    Field(
        pattern=r"^[0-9]{1,9}$",
        description="A token id.",
    ),
]
JsonSchema = dict[str, Any]
SchemaOrText = by_json_type(
    "a JSON schema, as an object or as text", text=CleanText, entries=JsonSchema
)
Regex = Annotated[str, Field(min_length=1, max_length=65_536), NO_NUL]
Choices = Annotated[list[CleanText], Field(min_length=1, max_length=4096)]


class StructuredOutputs(ApiModel):
    """vLLM's way to say what the text must be. Exactly one of these."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Regex | None = None
    grammar: Regex | None = None
    choice: Choices | None = None


class SamplingKnobs(ApiModel):
    """Left out, the deployment's defaults hold, then the model's own."""

    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: (
        Annotated[
            dict[BiasedToken, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_grammar: Regex | None = None
    guided_choice: Choices | None = None
    sampling_params_list: (
        Annotated[
            list[dict[str, Any]],
            Field(
                min_length=1,
                max_length=64,
                description="One set of sampling parameters a stage, in stage order.",
            ),
        ]
        | None
    ) = None
    mm_processor_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
