"""What can be known of a stage's parameters before any stage has begun on a request."""

from __future__ import annotations

from omnistage.ar.limits import check_token_params
from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.sampling import OmniTokenSamplingParams, SamplingParams

_NEED_TEXT = ("stop", "structured")


def check_stage_params(stage: ResolvedStage, params: SamplingParams) -> None:
    """Raises `InvalidRequestError` that names the stage and the field: a later stage would find it
    when the caller has already been sent what an earlier one made."""
    if not isinstance(params, OmniTokenSamplingParams):
        return
    try:
        check_token_params(params, vocab_size=None)
        _check_text(stage, params)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{stage.name}: {error.message}", param=error.param) from None


def _check_text(stage: ResolvedStage, params: OmniTokenSamplingParams) -> None:
    for name in _NEED_TEXT if stage.stage.output_modality is Modality.TOKENS else ():
        if getattr(params, name):
            raise InvalidRequestError(
                f"{name} needs text, but this stage generates tokens only; leave it out",
                param=name,
            )
