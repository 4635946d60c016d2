"""Step mode where copies and decoding run beside the steps: each result is still its request's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.diffusion.crowd import Crowd, max_difference
from tests.diffusion.driver import diffusion_request

STEP_MODE: dict[str, Any] = {
    "step_execution": True,
    "diffusion_streaming_output": True,
    "max_num_seqs": 3,
}
TOLERANCE = {"cpu": 1e-5, "cuda:0": 1e-3}
ROUNDS = {"cpu": 1, "cuda:0": 20}
JOINS_AT = {"r1": 1, "r2": 3, "r3": 4, "r4": 8}
ON_A_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def request(number: int, output_type: str):
    guided = number % 2
    return diffusion_request(
        ["a red cat", "a", "two very long dogs in front of a big old house by the sea"][number % 3],
        negative_prompt="bad" if guided else None,
        true_cfg_scale=3.0 if guided else 1.0,
        request_id=f"r{number}",
        height=32,
        width=48 if number == 3 else 32,
        num_inference_steps=2 + number,
        partial_images=number % 3,
        seed=number,
        output_type=output_type,
    )


@pytest.fixture(scope="module")
def expected():
    crowd = Crowd("qwen_image", **STEP_MODE)
    return {
        (number, kind): crowd.alone(request(number, kind))
        for number in range(5)
        for kind in ("latent", "np")
    }


@pytest.mark.invariant("DIFF-RUNTIME-INV-010")
@pytest.mark.parametrize("output_type", ["latent", "np"])
@pytest.mark.parametrize(
    ("device", "enforce_eager"),
    [
        ("cpu", True),
        pytest.param("cuda:0", True, marks=ON_A_CARD),
        pytest.param("cuda:0", False, marks=ON_A_CARD),
    ],
)
def test_results_are_right_whatever_is_put_where_memory_was_given_back(
    device, enforce_eager, output_type, expected
):
    crowd = Crowd("qwen_image", devices=(device,), enforce_eager=enforce_eager, **STEP_MODE)

    def spoil(command):
        """Memory that was given back too early holds NaN when it is read."""
        for size in (64, 1024, 16384, 262144):
            torch.full((size,), torch.nan, device=device)

    for _ in range(ROUNDS[device]):
        asked = {f"r{number}": request(number, output_type) for number in range(5)}
        outcome = crowd.run(asked, joins_at=JOINS_AT, before=spoil)
        assert outcome.errors == {}
        for number in range(5):
            found = outcome.results[f"r{number}"]
            wanted = expected[number, output_type]
            assert max_difference(found, wanted) <= TOLERANCE[device], number
            assert float(torch.as_tensor(wanted.tensors["images"]).std()) > 0.01
    crowd.executor.close()
