"""Adapters and compiled blocks under streaming."""

from __future__ import annotations

import pytest
import torch

from omnistage.diffusion.compilation import CompiledBlocks
from omnistage.memory.offload.factory import make_backend
from tests.memory.offload.models import Pipeline, built, placed, run


@pytest.mark.parametrize("backend_name", ["eager", "aot_eager"])
def test_compiled_blocks_stream(platform, backend_name):
    module = built("qwen")
    compiled = CompiledBlocks(module, backend=backend_name)
    compiled.install()
    expected = run(module, "qwen")
    variants = compiled.compilations()
    backend = make_backend(placed(module, (1, 4)), {}, platform, "cpu")
    backend.enable(Pipeline(transformer=module))
    assert torch.equal(run(module, "qwen"), expected)
    assert torch.equal(run(module, "qwen"), expected)
    assert compiled.compilations() == variants
    backend.disable()
    assert torch.equal(run(module, "qwen"), expected)
    compiled.close()


def add_adapter(module):
    peft = pytest.importorskip("peft", reason="the dev extra is not installed")
    module.add_adapter(
        peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=["to_q", "to_out.0"], init_lora_weights=False
        )
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_added_before_or_after(platform, when):
    reference, module = built("qwen"), built("qwen")
    plain = run(reference, "qwen")
    add_adapter(reference)
    expected = run(reference, "qwen")
    assert not torch.equal(plain, expected)
    if when == "before":
        add_adapter(module)
    backend = make_backend(placed(module, (1,)), {}, platform, "cpu")
    backend.enable(Pipeline(transformer=module))
    if when == "after":
        assert torch.equal(run(module, "qwen"), plain)
        add_adapter(module)
    assert torch.equal(run(module, "qwen"), expected)
    module.delete_adapters("default")
    assert torch.equal(run(module, "qwen"), plain)
    backend.disable()
    assert torch.equal(run(module, "qwen"), plain)


def test_weights_that_were_fused_are_copied_again(platform):
    reference, module = built("qwen"), built("qwen")
    add_adapter(reference)
    reference.fuse_lora()
    backend = make_backend(placed(module, (0, 1, 2, 3)), {}, platform, "cpu")
    backend.enable(Pipeline(transformer=module))
    run(module, "qwen")
    add_adapter(module)
    module.fuse_lora()
    backend.refresh()
    assert torch.equal(run(module, "qwen"), run(reference, "qwen"))
    backend.disable()
