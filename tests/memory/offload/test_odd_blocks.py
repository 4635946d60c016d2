"""Blocks of odd tensors, called in any order, failing anywhere: equal to resident ones."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.offload.factory import make_backend
from omnistage.memory.placement import ComponentPlacement, Placement, Residency
from tests.memory.offload.models import Pipeline


def _frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


def _tied(block, noise):
    block.first = block.second = _frozen(noise(3))


def _overlapping(block, noise):
    base = noise(8)
    block.first, block.second = _frozen(base[:5]), _frozen(base[3:])


ODD = {
    "bool": lambda block, noise: block.register_buffer("x", noise(3) > 0),
    "int64": lambda block, noise: block.register_buffer("x", (9 * noise(5)).long()),
    "uint16": lambda block, noise: block.register_buffer("x", torch.arange(5).to(torch.uint16)),
    "float8": lambda block, noise: block.register_buffer("x", noise(4).to(torch.float8_e4m3fn)),
    "complex": lambda block, noise: block.register_buffer("x", noise(3).to(torch.complex64)),
    "conjugate": lambda block, noise: block.register_buffer(
        "x", torch.complex(*noise(2, 3)).conj()
    ),
    "scalar": lambda block, noise: setattr(block, "x", _frozen(torch.tensor(2.5))),
    "empty": lambda block, noise: setattr(block, "x", _frozen(torch.empty(0, 4))),
    "transposed": lambda block, noise: setattr(block, "x", _frozen(noise(4, 3).t())),
    "tied": _tied,
    "overlapping": _overlapping,
    "computed": lambda block, noise: block.register_buffer(
        "x", noise(3).to(torch.complex128), persistent=False
    ),
    "nothing": lambda block, noise: block.register_parameter("x", None),
}


class Summing(nn.Module):
    """Adds all that it holds to its input."""

    fails = False

    def forward(self, state):
        for tensor in (*self.parameters(), *self.buffers()):
            plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            state = state + plain.double().sum()
        if self.fails:
            raise torch.OutOfMemoryError("injected")
        return state


def summing(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    block = Summing()
    ODD[kind](block, lambda *shape: torch.randn(*shape, generator=generator))
    return block


def chain(*blocks):
    module = nn.Module()
    module.blocks = nn.ModuleList(blocks)
    module.forward = nn.Sequential(*blocks).forward
    return module


def enabled(platform, module, residents=(), **settings):
    component = ComponentPlacement(
        component="transformer",
        residency=Residency.STREAMED,
        weight_bytes=1,
        streamed_blocks=tuple(
            f"blocks.{index}" for index in range(len(module.blocks)) if index not in residents
        ),
    )
    placement = Placement(strategy="layerwise", components={"transformer": component}, **settings)
    backend = make_backend(placement, {}, platform, "cpu")
    backend.enable(Pipeline(transformer=module))
    return backend


@pytest.mark.invariant("OFFLOAD-INV-002")
@pytest.mark.parametrize("limit_bytes", [None, 0])
@pytest.mark.parametrize("kind", ODD)
@torch.no_grad()
def test_odd_tensors_stream_bit_for_bit(platform, kind, limit_bytes):
    module = chain(summing(kind, 1), summing("scalar"), summing(kind, 2))
    expected = module(torch.ones(1))
    backend = enabled(platform, module, page_lock_limit_bytes=limit_bytes)
    with platform.watching_reads():
        for _ in range(3):
            assert torch.equal(module(torch.ones(1)), expected)
    backend.disable()
    assert torch.equal(module(torch.ones(1)), expected)
    assert platform.locked == {}


@pytest.mark.invariant("OFFLOAD-INV-006")
def test_a_dtype_that_does_not_move_is_refused_by_name(platform):
    block = Summing()
    block.register_buffer("x", torch.ones(3, dtype=torch.complex128))
    with pytest.raises(UnsupportedCombinationError, match=r"blocks\.0\.x is complex128"):
        enabled(platform, chain(block, summing("scalar")))


@pytest.mark.invariant("OFFLOAD-INV-005")
@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_any_sequence_of_calls_and_failures_is_right(platform, seed):
    """Against the plainest model of what is resident: everything, always."""
    choose = random.Random(seed)
    count = choose.randint(1, 7)
    module = chain(*(sized(choose.choice([1, 3, 70, 1000]), index) for index in range(count)))
    expected = [block(torch.zeros(1)) for block in module.blocks]
    residents = [index for index in range(count) if choose.random() < 0.2]
    backend = enabled(platform, module, residents, page_lock_limit_bytes=choose.choice([None, 0]))
    on_host = [block.x.data_ptr() for block in module.blocks]
    served = 0
    with platform.watching_reads():
        for step in range(120):
            index = choose.randrange(count) if choose.random() < 0.4 else step % count
            served += call_one(platform, backend, module.blocks[index], expected[index], choose)
            assert [block.x.data_ptr() for block in module.blocks] == on_host
    backend.disable()
    assert served > 60
    assert platform.overtaken == 0
    assert platform.locked == {}


def sized(count, seed):
    block = Summing()
    block.x = _frozen(torch.randn(count, generator=torch.Generator().manual_seed(seed)))
    return block


def call_one(platform, backend, block, expected, choose):
    what = choose.choice(["fails", "upload fails", "refresh", *["calls"] * 7])
    if what == "upload fails":
        number = platform.uploads + choose.randint(1, 2)
        platform.fail_upload[number] = torch.OutOfMemoryError("injected")
    if what == "refresh":
        backend.refresh()
    block.fails = what == "fails"
    with torch.inference_mode(choose.random() < 0.5):
        try:
            found = block(torch.zeros(1))
        except torch.OutOfMemoryError:
            return False
    assert not block.fails
    assert torch.equal(found, expected)
    return True
