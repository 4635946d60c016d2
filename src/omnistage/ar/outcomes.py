"""What a step's tensors on the host say of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnistage.ar.running import Running
from omnistage.ar.sampling.logprobs import Logprobs
from omnistage.ar.step import StepOutcome
from omnistage.contracts.errors import InternalError
from omnistage.contracts.identity import RequestKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from omnistage.ar.step_runner import StepResult

_LOGPROBS = ("logprob", "rank", "top_ids", "top_logprobs")


def host_part(result: StepResult) -> dict[str, torch.Tensor]:
    """What `read_outcome` needs of a step."""
    tensors = {"tokens": result.tokens, "finite": result.finite}
    if result.logprobs is not None:
        tensors |= {name: getattr(result.logprobs, name) for name in _LOGPROBS}
    return tensors


def read_outcome(
    outcome: StepOutcome,
    sampled: Sequence[tuple[RequestKey, Running]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """`sampled` in the order of the tensors' rows, which may be more (padding). The sequences learn
    their tokens."""
    tokens, finite = tensors["tokens"].tolist(), tensors["finite"].tolist()
    logprobs = None
    if _LOGPROBS[0] in tensors:
        logprobs = Logprobs(**{name: tensors[name] for name in _LOGPROBS})
    for index, (key, live) in enumerate(sampled):
        if not finite[index]:
            outcome.errors[key] = InternalError(
                "the model's logits are no numbers, so no token can be chosen",
                detail=f"row {live.sequence.row}, {len(live.sequence.token_ids)} tokens",
            )
            continue
        live.sequence.token_ids.append(tokens[index])
        outcome.tokens[key] = tokens[index]
        count = live.sequence.params.logprobs
        if logprobs is not None and count is not None:
            outcome.logprobs[key] = logprobs.of_row(index, count)
