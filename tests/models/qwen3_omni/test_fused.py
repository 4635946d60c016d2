"""What is done to thinker, talker and code predictor for a GPU changes nothing that is said."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.checkpoints import checkpoint
from tests.interpreted import cases_agree
from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.frame_cases import CASES, compare
from tests.models.qwen3_omni.requests import omni_prompt
from tests.models.qwen3_omni.test_end_to_end import PARAMS, assert_as_expected


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_frame_kernel_does_what_torch_does() -> None:
    assert cases_agree("tests.models.qwen3_omni.frame_cases") == f"{len(CASES)} cases agree\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_compiled_frame_kernel_does_what_torch_does(case: tuple[int, ...]) -> None:
    compare(*case, "cuda")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torch._inductor") is None, reason="torch has no compiler"
)
def test_fused_and_compiled_stages_equal_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators run in torch here; compiled blocks, joined projections and the layers' order
    are those of a GPU."""
    from omnistage import Omni
    from omnistage.ar import assembly
    from omnistage.ar.surgery import fuse_for_gpu

    done = []

    def prepare(model, *_):
        done.append(fuse_for_gpu(model))
        return done[-1]

    monkeypatch.setattr(assembly, "prepare_weights", prepare)
    with Omni(
        str(checkpoint(reference.CHECKPOINT)), process="inline", kv_cache_gib=0.05, max_num_seqs=4
    ) as omni:
        prompts = [omni_prompt(case) for case in reference.CASES.values()]
        outputs = omni.generate(prompts, sampling_params_list=PARAMS, use_tqdm=False)
        for name, output in zip(reference.CASES, outputs, strict=True):
            assert_as_expected(output, name)
    done.sort(key=lambda notes: notes["compiled_layers"])
    assert [notes["compiled_layers"] for notes in done] == [3, 4]
    assert all(notes["joined_projections"] > 0 for notes in done)
    assert done[0]["fused_code_predictor"]
