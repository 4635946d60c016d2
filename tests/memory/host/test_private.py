"""Blocks packed into memory of this process."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from omnistage.contracts.errors import StageLostError, UnsupportedCombinationError
from omnistage.memory.host import page_lock
from omnistage.memory.host.layout import host_views
from omnistage.memory.host.modules import streamed_tensors
from omnistage.memory.host.private import BlockPacker, PrivateWeights
from omnistage.memory.offload.host import ALIGNMENT_BYTES, HostBacking

PATHS = ("layers.0", "layers.1", "layers.2")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 7)
        self.small = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.scalar = torch.nn.Parameter(torch.tensor(2.5))
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))
        self.turned = torch.nn.Parameter(torch.randn(4, 6).T)
        self.register_buffer("scale", torch.randn(7, 1).to(torch.float8_e4m3fn))
        self.register_buffer("table", torch.arange(4), persistent=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in PATHS)
        self.head = torch.nn.Linear(7, 2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


def tensors(model):
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.invariant("HOST-INV-009")
def test_objects_and_values_stay_and_bytes_move(model, device):
    before = tensors(model)
    values = {name: tensor.clone() for name, tensor in before.items()}
    weights = PrivateWeights.pack(model, PATHS, device, "cpu")
    assert weights.backing is HostBacking.PRIVATE
    after = tensors(model)
    for name, tensor in after.items():
        assert tensor is before[name]
        assert tensor.dtype == values[name].dtype
        assert torch.equal(tensor.float(), values[name].float())
    moved = set()
    for path, block in weights.blocks.items():
        assert len(block.pieces) == 1
        assert block.copied_bytes == block.nbytes
        for name, view in host_views(block).items():
            assert name.startswith(path)
            assert view.shape == after[name].shape
            assert view.data_ptr() == after[name].data_ptr()
            assert view.data_ptr() % ALIGNMENT_BYTES == 0
            moved.add(name)
    assert set(after) - moved == {
        "head.weight",
        "head.bias",
        *(f"{path}.table" for path in PATHS),
    }
    weights.close()


@pytest.mark.invariant("HOST-INV-009")
def test_old_memory_is_free_when_its_block_is_packed(model):
    storage = weakref.ref(model.layers[0].linear.weight.untyped_storage())
    packer = BlockPacker(1 << 16)
    packer.add(model, "layers.0")
    gc.collect()
    assert storage() is None
    packer.finish().close()


@pytest.mark.invariant("HOST-INV-009")
def test_pages_are_locked_when_they_are_filled_with_one_call_a_region(model, device, monkeypatch):
    lock, seen = device.lock_pages, []

    def lock_pages(address, nbytes, name, *, read_only):
        seen.append((bool(model.layers[2].scalar == 2.5), read_only))
        lock(address, nbytes, name, read_only=read_only)

    monkeypatch.setattr(device, "lock_pages", lock_pages)
    weights = PrivateWeights.pack(model, PATHS, device, "cpu")
    assert seen == [(True, False)]
    assert weights.is_page_locked
    assert all(device.is_locked(block.pieces[0].source) for block in weights.blocks.values())
    weights.close()
    assert device.locked == {}


def test_a_full_region_is_followed_by_another(model, device):
    size_bytes = PrivateWeights.pack(Model(), ["layers.0"]).blocks["layers.0"].nbytes
    packer = BlockPacker(3 * size_bytes, region_bytes=2 * size_bytes)
    for path in PATHS:
        packer.add(model, path)
    weights = packer.finish()
    assert [memory.nbytes for memory in weights.memories] == [2 * size_bytes, size_bytes]
    assert weights.page_lock(device, "cpu", None)
    assert device.lock_calls == 2
    assert weights.locked_bytes == device.locked_bytes
    weights.close()


def test_a_block_larger_than_a_region_gets_its_own(model):
    packer = BlockPacker(10, region_bytes=10)
    packer.add(model, "layers.0")
    weights = packer.finish()
    assert weights.memories[0].nbytes == weights.blocks["layers.0"].nbytes
    weights.close()


@pytest.mark.invariant("HOST-INV-004")
def test_refused_locks_leave_plain_memory(model, device):
    device.refuse_lock = {1}
    weights = PrivateWeights.pack(model, PATHS, device, "cpu")
    assert not weights.is_page_locked
    assert weights.locked_bytes == 0
    assert model.layers[1].scalar == 2.5
    weights.close()
    limited = PrivateWeights.pack(Model(), PATHS, device, "cpu", limit_bytes=0)
    assert not limited.is_page_locked
    assert device.lock_calls == 1


@pytest.mark.invariant("HOST-INV-005")
def test_views_outlive_weights_that_could_not_be_unlocked(model, device, monkeypatch):
    monkeypatch.setattr(page_lock, "_LOCKED_FOR_GOOD", [])
    weights = PrivateWeights.pack(model, PATHS, device, "cpu")
    device.refuse_unlock = {1}
    with pytest.raises(StageLostError):
        weights.close()
    assert model.layers[1].scalar == 2.5


@pytest.mark.invariant("HOST-INV-010")
@pytest.mark.parametrize("where", ["another block", "outside"])
def test_a_shared_tensor_is_refused_and_nothing_moves(model, where):
    if where == "outside":
        model.head.bias = model.layers[1].small
    else:
        model.layers[2].small = model.layers[1].small
    places = {name: tensor.data_ptr() for name, tensor in tensors(model).items()}
    with pytest.raises(UnsupportedCombinationError, match=r"small|bias.*offload none"):
        PrivateWeights.pack(model, PATHS)
    assert {name: tensor.data_ptr() for name, tensor in tensors(model).items()} == places


def test_a_tensor_with_two_names_in_its_block_moves_once(model):
    model.layers[0].again = model.layers[0].small
    assert "layers.0.again" not in streamed_tensors(model, "layers.0")
    weights = PrivateWeights.pack(model, PATHS)
    assert model.layers[0].again.data_ptr() == model.layers[0].small.data_ptr()
    weights.close()
