"""`omnistage plan` of token models: from headers, with what a token's keys and values take."""

from __future__ import annotations

import shutil

import pytest

from omnistage.cli.main import main
from tests.checkpoints import checkpoint
from tests.checkpoints.gguf_files import write_gguf


def planned(capsys, *words):
    code = main(["plan", *words])
    out = capsys.readouterr()
    return code, out.out + out.err


@pytest.mark.invariant("LOAD-INV-003")
def test_a_language_model(capsys):
    code, out = planned(capsys, str(checkpoint("qwen3-moe")), "--max-model-len", "512")
    assert code == 0
    assert "causal_lm (Qwen3MoeForCausalLM), 1 stage" in out
    assert "converted while loading" in out
    per_token = 3 * 2 * (16 + 16) * 4
    assert f"{per_token} bytes a token as float32, 0.4 MiB for 512 tokens" in out


def test_a_gguf_file(capsys, tmp_path):
    code, out = planned(capsys, str(write_gguf(tmp_path / "tiny.gguf")))
    assert code == 0
    assert "loaded by the loader of transformers" in out
    assert "bytes a token" in out


def test_every_stage_of_an_omni_model(capsys):
    code, out = planned(capsys, str(checkpoint("qwen3-omni")))
    assert code == 0
    for stage in ("0, thinker", "1, talker", "2, code2wav"):
        assert f"load plan of stage {stage}" in out
    assert out.count("bytes a token") == 2


@pytest.mark.invariant("LOAD-INV-003")
def test_weights_are_not_read(capsys, tmp_path):
    """The header stays, the data are nonsense."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "m")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:header_bytes] + b"\xff" * (len(content) - header_bytes))
    outs = [planned(capsys, str(model))[1] for model in (folder, checkpoint("llama"))]
    plans = [out.partition("\nload plan of stage 0")[2] for out in outs]
    assert plans[0] == plans[1]
    assert "LlamaForCausalLM" in plans[0]


@pytest.mark.invariant("MEM-INV-001")
def test_a_budget_refuses(capsys):
    code, out = planned(capsys, str(checkpoint("llama")), "--memory-budget-gib", "0.0001")
    assert code == 2
    assert "LlamaForCausalLM needs" in out
