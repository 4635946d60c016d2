"""On a CUDA device: real streams, real page locks, two kinds of memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.diffusion.compilation import CompiledBlocks
from omnistage.memory.offload.factory import make_backend
from omnistage.platforms.registry import platform_of
from tests.memory.offload.models import MODELS, Pipeline, built, placed, run
from tests.memory.offload.test_adapters import add_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"


def expected(name, batch=1, seed=0):
    return run(built(name, seed).to(DEVICE), name, batch, device=DEVICE)


def enabled(module, residents=(), **settings):
    pipeline = Pipeline(transformer=module, vae=nn.Conv2d(1, 1, 1))
    backend = make_backend(placed(module, residents, **settings), {}, platform_of(DEVICE), DEVICE)
    backend.enable(pipeline)
    return backend


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("limit_bytes", [None, 0])
def test_streamed_equals_resident_bit_for_bit(name, limit_bytes):
    module = built(name)
    for batch, residents in [(1, ()), (4, (0,)), (4, (1, 2))]:
        backend = enabled(module, residents, page_lock_limit_bytes=limit_bytes)
        assert backend.describe()["page_locked"] is (limit_bytes is None)
        found = run(module, name, batch, device=DEVICE, steps=6)
        backend.disable()
        wanted = run(built(name).to(DEVICE), name, batch, device=DEVICE, steps=6)
        assert torch.equal(found, wanted)
        assert {one.device.type for one in module.parameters()} == {"cpu"}


def test_a_module_on_the_device_goes_back_there():
    module = built("qwen").to(DEVICE)
    identities = [id(one) for one in module.parameters()]
    backend = enabled(module)
    assert module.transformer_blocks[0].attn.to_q.weight.device.type == "cpu"
    assert module.img_in.weight.device.type == "cuda"
    assert torch.equal(run(module, "qwen", device=DEVICE), expected("qwen"))
    backend.disable()
    assert {one.device.type for one in module.parameters()} == {"cuda"}
    assert identities == [id(one) for one in module.parameters()]
    assert torch.equal(run(module, "qwen", device=DEVICE), expected("qwen"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(when):
    reference, module = built("qwen").to(DEVICE), built("qwen")
    add_adapter(reference)
    if when == "before":
        add_adapter(module)
    backend = enabled(module, (1,))
    if when == "after":
        run(module, "qwen", device=DEVICE)
        add_adapter(module)
    found = run(module, "qwen", device=DEVICE)
    wanted = run(reference, "qwen", device=DEVICE)
    backend.disable()
    torch.testing.assert_close(found, wanted)


def test_compiled_blocks():
    module = built("qwen").to(DEVICE)
    compiled = CompiledBlocks(module)
    compiled.install()
    wanted = run(module, "qwen", device=DEVICE)
    variants = compiled.compilations()
    backend = enabled(module)
    assert torch.equal(run(module, "qwen", device=DEVICE), wanted)
    assert compiled.compilations() == variants
    backend.disable()
    compiled.close()


class Wide(nn.Module):
    """Blocks of a few hundred megabytes whose work outlasts the host's by far."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return x


@pytest.mark.parametrize("limit_bytes", [None, 0])
@pytest.mark.parametrize("tokens", [16, 8192])
def test_the_device_works_while_blocks_are_copied(tokens, limit_bytes):
    torch.manual_seed(0)
    module = Wide(8, 4096).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(tokens, 4096, dtype=torch.bfloat16, device=DEVICE)
    backend = enabled(module, page_lock_limit_bytes=limit_bytes)
    with torch.inference_mode():
        found = [module(x) for _ in range(4)]
    torch.cuda.synchronize()
    backend.disable()
    module.to(DEVICE)
    with torch.inference_mode():
        wanted = module(x)
    assert all(torch.equal(one, wanted) for one in found)
    assert wanted.isfinite().all()


def test_memory_comes_back():
    module = Wide(4, 2048).requires_grad_(False)
    before_bytes = torch.cuda.memory_allocated()
    backend = enabled(module)
    slot_bytes = backend.describe()["slot_bytes"]
    assert torch.cuda.memory_allocated() - before_bytes <= 2 * slot_bytes + 2**20
    backend.disable()
    assert torch.cuda.memory_allocated() == before_bytes
