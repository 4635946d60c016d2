"""What a deployment may set on a token stage, read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.ar.stage_options import check_options
from omnistage.config.pipeline import ENTRY
from omnistage.config.schema import TOKEN_KEYS
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.contracts.modalities import Modality

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage

_STAGE_FIELDS = (
    "max_num_seqs",
    "enforce_eager",
    "async_chunk",
    "default_sampling_params",
    *TOKEN_KEYS,
)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """A token stage: its keys (see `ResolvedStage`) and its `options`.

    Of `options`: `token_model` names the `TokenModelFactory` ("package.module:Name");
    `feeds_stages` says that later stages read what this one emits, and `emits_payload` that they
    need tensors of it beside its tokens; `min_input_tokens` of what the stage before makes must be
    there before a prompt is prepared; `max_queued_requests` bounds how many may wait;
    `model` is the model's own, a mapping that only its factory reads. `entry` and
    `output_modality` come from the topology.
    """

    token_model: str
    feeds_stages: bool = False
    emits_payload: bool = False
    min_input_tokens: int = 0
    max_queued_requests: int = 4096
    model: dict[str, Any] = field(default_factory=dict)
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    gpu_memory_utilization: float
    kv_cache_gib: float | None
    block_size: int | None
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    async_chunk: bool
    async_scheduling: bool
    fuse_layers: bool
    enforce_eager: bool
    default_sampling_params: dict[str, Any]
    entry: bool
    output_modality: Modality


_OPTION_TYPES: dict[str, tuple[type, str]] = {
    "token_model": (str, 'an import string "package.module:Name"'),
    "feeds_stages": (bool, "true or false"),
    "emits_payload": (bool, "true or false"),
    "min_input_tokens": (int, "a positive integer"),
    "max_queued_requests": (int, "a positive integer"),
    "model": (dict, "a mapping"),
}


def read_token_options(stage: ResolvedStage) -> TokenOptions:
    """Raises `ConfigurationError` for an unknown option (naming the nearest), a wrong value or none
    where one is needed, and `UnsupportedCombinationError` for keys that exclude each other."""
    check_options(stage, _OPTION_TYPES, kind="token")
    if "token_model" not in stage.options:
        raise ConfigurationError(
            f"stage {stage.stage_id} ({stage.name}): option token_model is missing; it names "
            "the model of the stage and is set by the model's folder"
        )
    options = TokenOptions(
        **stage.options,
        **{name: getattr(stage, name) for name in _STAGE_FIELDS},
        entry=ENTRY in stage.stage.input_sources,
        output_modality=stage.stage.output_modality,
    )
    _check_combination(stage, options)
    return options


def _check_combination(stage: ResolvedStage, options: TokenOptions) -> None:
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise UnsupportedCombinationError(
            f"stage {stage.stage_id}: max_num_batched_tokens is {options.max_num_batched_tokens}, "
            f"less than max_num_seqs {options.max_num_seqs}: not every running request could "
            "decode in one step; raise the one or lower the other",
            param="max_num_batched_tokens",
        )
    if options.emits_payload and not options.feeds_stages:
        raise ConfigurationError(
            f"stage {stage.stage_id}: emits_payload needs feeds_stages: nobody else reads it"
        )
