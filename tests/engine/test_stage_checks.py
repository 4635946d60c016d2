"""A parameter that only a later stage would look at is refused before the first begins."""

from __future__ import annotations

from typing import Any

import pytest

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import OmniTokenSamplingParams, StructuredOutput
from omnistage.engine.admission import stage_params
from omnistage.engine.configure import configure
from tests.checkpoints import checkpoint


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1.0}, "temperature must be between 0 and 100, got -1.0"),
        ({"min_tokens": 5, "max_tokens": 3}, "more than max_tokens 3"),
        ({"stop": ["x"]}, "stop needs text"),
        ({"structured": StructuredOutput(json_object=True)}, "structured needs text"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
    ],
)
def test_a_talkers_parameters(wrong: dict[str, Any], words: str) -> None:
    config = configure(str(checkpoint("qwen3-omni")), device="cpu")
    right: list[Any] = list(stage_params(config, None, None))
    right[0] = OmniTokenSamplingParams(stop=["x"])
    assert len(stage_params(config, None, right)) == 3
    right[1] = OmniTokenSamplingParams(**wrong)
    with pytest.raises(InvalidRequestError, match=r"^talker: ") as refused:
        stage_params(config, None, right)
    assert words in str(refused.value)
    assert refused.value.param in wrong
