"""What all bodies share: strict types, known fields, clean text."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_SEED = 2**63 - 1
LONGEST_SIDE_PIXELS = 65_535
_SIZE = re.compile(r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")

_NICKNAMES = {"steps": "num_inference_steps", "cfg_scale": "guidance_scale"}
"""What people call a field whose name is not close."""


def unknown_field(
    name: str, allowed: list[str], inapplicable: frozenset[str], reason: str
) -> PydanticCustomError:
    if name in inapplicable:
        return PydanticCustomError(
            "inapplicable_field", "{reason}; leave it out", {"field": name, "reason": reason}
        )
    nearest = [_NICKNAMES[name]] if _NICKNAMES.get(name) in allowed else []
    nearest = nearest or difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"allowed: {', '.join(sorted(allowed))}"
    return PydanticCustomError(
        "unknown_field", "unknown field; {hint}", {"field": name[:80], "hint": hint}
    )


class ApiModel(BaseModel):
    """A body or a part of one. Unknown fields and loosely typed values are errors.

    `inapplicable` names fields of OpenAI's that get `inapplicable_reason` instead of a guess.
    """

    inapplicable: ClassVar[frozenset[str]] = frozenset()
    inapplicable_reason: ClassVar[str] = "has no meaning for a model that makes images"

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _know_every_field(cls, data: Any) -> Any:
        if isinstance(data, dict):
            allowed = [field.alias or name for name, field in cls.model_fields.items()]
            for name in data:
                if name not in allowed:
                    raise unknown_field(
                        str(name), allowed, cls.inapplicable, cls.inapplicable_reason
                    )
        return data


def without_extra_body(data: Any) -> Any:
    """Some clients send `extra_body` as it is; the `openai` package flattens it itself."""
    if not isinstance(data, dict) or not isinstance(data.get("extra_body"), dict):
        return data
    extra = data["extra_body"]
    twice = sorted(str(name) for name in extra if name in data)
    if twice:
        raise PydanticCustomError(
            "given_twice", "also given in extra_body; give it once", {"field": twice[0]}
        )
    return {name: value for name, value in data.items() if name != "extra_body"} | extra


class ResponseModel(BaseModel):
    """What we send. Documents the answer; it is rendered elsewhere."""

    model_config = ConfigDict(extra="forbid")


def _no_nul(text: str) -> str:
    if "\x00" in text:
        raise PydanticCustomError("nul_character", "a NUL character is not allowed in text")
    return text


def _is_size(text: str) -> str:
    if not _SIZE.fullmatch(text):
        raise PydanticCustomError(
            "size",
            'no size; write WIDTHxHEIGHT in pixels (at most 5 digits each), such as "1024x768", '
            'or "auto"',
        )
    return text


def by_json_type(message: str, *, text: Any = None, items: Any = None, entries: Any = None) -> Any:
    """A union told apart by what JSON it is (a string, an array, an object), so that faults are
    named by one path only. `message` says what is allowed."""
    kinds = {"<text>": text, "<list>": items, "<object>": entries}
    types = {str: "<text>", list: "<list>", dict: "<object>"}

    def kind_of(value: Any) -> str | None:
        kind = types.get(type(value), "<object>" if isinstance(value, BaseModel) else None)
        return kind if kind is not None and kinds[kind] is not None else None

    tagged = [Annotated[kind, Tag(name)] for name, kind in kinds.items() if kind is not None]
    return Annotated[
        Union[tuple(tagged)],  # noqa: UP007 (its members are known at run time only)
        Discriminator(
            kind_of, custom_error_type="kind_of_json", custom_error_message=f"must be {message}"
        ),
    ]


NO_NUL = AfterValidator(_no_nul)
CleanText = Annotated[str, NO_NUL]
PromptText = Annotated[str, Field(min_length=1, description="What to draw."), NO_NUL]
ModelName = Annotated[str, Field(min_length=1, max_length=512), NO_NUL]
Size = Annotated[
    str,
    Field(
        description='Width and height in pixels, such as "1024x768", or "auto".',
        json_schema_extra={"pattern": _SIZE.pattern},
    ),
    AfterValidator(_is_size),
]
Side = Annotated[int, Field(ge=1, le=LONGEST_SIDE_PIXELS)]


class DiffusionKnobs(ApiModel):
    """Parameters of the denoising itself; names are those of `diffusers`. Left out, the model's
    own defaults hold."""

    negative_prompt: CleanText | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    true_cfg_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    strength: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(ResponseModel):
    """The body of every answer with status 400 and above."""

    error: ErrorDetail
