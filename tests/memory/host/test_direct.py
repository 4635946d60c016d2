"""Blocks in the checkpoint's files: coalesced, checked before, given back in order."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil

import pytest
import torch

from omnistage.contracts.errors import CheckpointError, StageLostError
from omnistage.memory.checkpoint import DTYPE_NAMES, read_header
from omnistage.memory.host import page_lock
from omnistage.memory.host.direct import DirectWeights
from omnistage.memory.host.layout import fill, host_views
from omnistage.memory.host.preflight import directly_mappable
from omnistage.memory.materialize import materialize
from omnistage.memory.plan import SourceKind
from omnistage.memory.planner import plan_module
from tests.memory.host.test_mapping import maps_of
from tests.memory.offload.fake_device import late_device

NAME = "transformer_blocks.1.attn.to_q.weight"


def with_source(plan, name, **changes):
    source = dataclasses.replace(plan.sources[name], **changes)
    return dataclasses.replace(plan, sources={**plan.sources, name: source})


@pytest.fixture
def copied(aligned_folders, tmp_path):
    from diffusers import FluxTransformer2DModel

    folder = shutil.copytree(aligned_folders[0], tmp_path / "copied")
    plan = plan_module(FluxTransformer2DModel, folder)
    return plan, plan.files[0]


@pytest.mark.invariant("HOST-INV-006")
def test_a_block_of_one_file_is_one_copy(aligned_plans, blocks):
    weights = DirectWeights.open(aligned_plans[0], blocks)
    for block in weights.blocks.values():
        assert len(block.pieces) == 1
        assert block.copied_bytes == block.nbytes == sum(place.nbytes for place in block.places)
    weights.close()


@pytest.mark.invariant("HOST-INV-006")
def test_a_block_across_shards_is_one_copy_from_each(aligned_plans, blocks):
    plan = aligned_plans[1]
    weights = DirectWeights.open(plan, blocks)
    module = materialize(plan).state_dict()
    crossing = 0
    for path, block in weights.blocks.items():
        files = {plan.sources[place.name].file for place in block.places}
        crossing += len(files) > 1
        assert len(block.pieces) == len(files)
        image = torch.empty(block.nbytes, dtype=torch.uint8)
        fill(image, block.pieces)
        for name, view in host_views(block).items():
            assert torch.equal(view, module[name])
            place = next(place for place in block.places if place.name == name)
            copied = image[place.offset_bytes : place.offset_bytes + place.nbytes]
            assert copied.numpy().tobytes() == module[name].numpy().tobytes()
        assert path in blocks
    assert crossing
    weights.close()


@pytest.mark.invariant("HOST-INV-006")
def test_tensors_that_lie_apart_are_copied_apart(copied):
    plan, file = copied
    paths = ("transformer_blocks.0", "transformer_blocks.1")
    expected = {name: tensor.clone() for name, tensor in materialize(plan).state_dict().items()}
    names = sorted(read_header(file), key=lambda name: name.partition("blocks.")[2][2:])
    write_in_order(file, names)
    plan = plan_module(plan.cls, plan.folder)
    weights = DirectWeights.open(plan, paths)
    for path in paths:
        block = weights.blocks[path]
        assert len(block.pieces) == len(block.places) > 10
        for name, view in host_views(block).items():
            assert torch.equal(view, expected[name])
    weights.close()


def write_in_order(file, names):
    """The same tensors, the data in the order of `names`."""
    stored, data = read_header(file), file.read_bytes()
    header, parts, end = {}, [], 0
    spelled = {name: short for short, name in DTYPE_NAMES.items()}
    for name in names:
        one = stored[name]
        parts.append(data[one.offset_bytes : one.offset_bytes + one.nbytes])
        header[name] = {
            "dtype": spelled[one.dtype],
            "shape": one.shape,
            "data_offsets": [end, end + one.nbytes],
        }
        end += one.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def lockable_bytes(plan, blocks):
    with late_device() as other:
        weights = DirectWeights.open(plan, blocks)
        assert weights.page_lock(other, "cpu", None)
        locked_bytes = weights.locked_bytes
        weights.close()
    return locked_bytes


@pytest.mark.invariant("HOST-INV-006")
def test_blocks_that_adjoin_in_their_file_are_locked_with_one_call(aligned_plans, blocks, device):
    needed_bytes = lockable_bytes(aligned_plans[0], blocks)
    weights = DirectWeights.open(aligned_plans[0], blocks)
    assert not weights.is_page_locked
    assert weights.page_lock(device, "cpu", needed_bytes)
    assert weights.page_lock(device, "cpu", 0), "locked already"
    assert device.lock_calls == 2, "single blocks, then what stays resident, then the others"
    assert weights.is_page_locked
    assert weights.locked_bytes == device.locked_bytes
    for block in weights.blocks.values():
        assert all(device.is_locked(piece.source) for piece in block.pieces)
    weights.close()
    assert device.locked == {}
    assert not weights.is_page_locked
    with pytest.raises(AssertionError, match="closed"):
        weights.page_lock(device, "cpu", None)


@pytest.mark.invariant("HOST-INV-003")
def test_unlocked_before_unmapped(aligned_plans, blocks, device, monkeypatch):
    weights = DirectWeights.open(aligned_plans[0], blocks)
    weights.page_lock(device, "cpu", None)
    file = aligned_plans[0].files[0]
    unlock, seen = device.unlock_pages, []

    def unlock_pages(address, name):
        seen.append(maps_of(file))
        unlock(address, name)

    monkeypatch.setattr(device, "unlock_pages", unlock_pages)
    weights.close()
    weights.close()
    gc.collect()
    assert seen == [["r--s"]] * 2
    assert maps_of(file) == []


@pytest.mark.invariant("HOST-INV-005")
def test_what_cannot_be_unlocked_stays_mapped(aligned_plans, blocks, device, monkeypatch):
    kept = []
    monkeypatch.setattr(page_lock, "_LOCKED_FOR_GOOD", kept)
    weights = DirectWeights.open(aligned_plans[0], blocks)
    weights.page_lock(device, "cpu", None)
    device.refuse_unlock = {1}
    with pytest.raises(StageLostError):
        weights.close()
    gc.collect()
    assert maps_of(aligned_plans[0].files[0]) == ["r--s"]
    assert all(memory.is_closed for memory in weights.memories)
    kept.clear()
    gc.collect()
    assert maps_of(aligned_plans[0].files[0]) == []


@pytest.mark.invariant("HOST-INV-006")
def test_beyond_the_limit_nothing_is_locked(aligned_plans, blocks, device):
    needed_bytes = lockable_bytes(aligned_plans[0], blocks)
    weights = DirectWeights.open(aligned_plans[0], blocks)
    assert not weights.page_lock(device, "cpu", needed_bytes - 1)
    assert not weights.is_page_locked
    assert device.lock_calls == 0
    weights.close()


@pytest.mark.invariant("HOST-INV-007")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stored_dtype": "float16"}, "is stored as float16 and wanted as float32"),
        ({"kind": SourceKind.CONVERTED}, "does not lie in a file: it is converted"),
        ({"kind": SourceKind.LIBRARY}, "does not lie in a file: it is library"),
        ({"offset_bytes": 4098}, "begins at byte 4098, between two items of float32"),
    ],
)
def test_one_unfitting_tensor_refuses_the_component(aligned_plans, blocks, changes, reason):
    plan = with_source(aligned_plans[0], NAME, **changes)
    assert directly_mappable(aligned_plans[0], blocks) is None
    assert str(directly_mappable(plan, blocks)) == f"{NAME} {reason}"
    assert directly_mappable(plan, ["transformer_blocks.0"]) is None


@pytest.mark.invariant("HOST-INV-007")
def test_a_tensor_with_two_names_and_a_block_without_any_are_refused(aligned_plans, blocks):
    plan = with_source(aligned_plans[0], "x_embedder.bias", kind=SourceKind.TIED, tied_to=NAME)
    assert "are one tensor" in str(directly_mappable(plan, blocks))
    assert str(directly_mappable(plan, ["blocks.7"])) == "blocks.7 has no tensors in the plan"
    assert directly_mappable(plan, ["transformer_blocks.0"]) is None


@pytest.mark.invariant("HOST-INV-007")
def test_a_buffer_that_the_class_computes_is_no_obstacle_and_no_place(aligned_plans, blocks):
    name = "transformer_blocks.1.norm2.computed"
    source = dataclasses.replace(aligned_plans[0].sources[NAME], kind=SourceKind.COMPUTED)
    plan = dataclasses.replace(aligned_plans[0], sources={**aligned_plans[0].sources, name: source})
    weights = DirectWeights.open(plan, blocks)
    names = {place.name for place in weights.blocks["transformer_blocks.1"].places}
    assert NAME in names
    assert name not in names
    weights.close()


@pytest.mark.invariant("HOST-INV-008")
def test_a_file_that_shrank_is_an_error_before_it_is_mapped(copied, blocks):
    plan, file = copied
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"truncated.*download it again"):
        DirectWeights.open(plan, blocks)
    assert maps_of(file) == []


@pytest.mark.invariant("HOST-INV-008")
def test_a_file_that_was_replaced_is_an_error(copied, blocks):
    from safetensors.torch import load_file, save_file

    plan, file = copied
    tensors = load_file(file)
    tensors[NAME] = tensors[NAME][:8].clone()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"changed since it was planned.*start again"):
        DirectWeights.open(plan, blocks)


@pytest.mark.invariant("HOST-INV-008")
def test_a_failure_in_the_middle_leaves_nothing_mapped(aligned_folders, tmp_path, blocks):
    from diffusers import FluxTransformer2DModel

    folder = shutil.copytree(aligned_folders[1], tmp_path / "copied")
    plan = plan_module(FluxTransformer2DModel, folder)
    for file in plan.files[1:]:
        file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        DirectWeights.open(plan, blocks)
    gc.collect()
    assert maps_of(plan.files[0]) == []
