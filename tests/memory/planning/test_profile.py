"""A pass without weights counts what a pass with weights holds and does."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnistage.memory.planning.profile import profile_forward
from omnistage.memory.planning.signatures import ATTENTION
from omnistage.memory.planning.tracking import ForwardTracker
from tests.memory.planning.modules import components, real, run_for, tiny_wan

FAMILIES = ("qwen_image", "flux", "sd3", "sd15", "sdxl")


class LiveStorages(TorchDispatchMode):
    """Counts by other means: after each operation, whatever storages of results are not freed."""

    def __init__(self, weights: torch.nn.Module) -> None:
        super().__init__()
        self.weights = {
            one.untyped_storage()._cdata for one in (*weights.parameters(), *weights.buffers())
        }
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.weights:
                    nbytes = -(-storage.nbytes() // 512) * 512
                    self.live[storage._cdata] = (StorageWeakRef(storage), nbytes)
        self.live = {key: one for key, one in self.live.items() if not one[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self.live.values()))
        return out


def modules_of(family: str) -> dict[str, torch.nn.Module]:
    return tiny_wan() if family == "wan" else components(family)


@pytest.mark.invariant("PLAN-INV-001")
@pytest.mark.parametrize("family", [*FAMILIES, "wan"])
def test_a_pass_without_weights_equals_one_with_them(family):
    modules = modules_of(family)
    runs = {name: run_for(one, "float32", modules["vae"]) for name, one in modules.items()}
    for name, module in modules.items():
        empty = profile_forward(module, runs[name])
        held = profile_forward(real(module), runs[name], device="cpu")
        assert empty.peak_activation_bytes == held.peak_activation_bytes > 0, name
        assert flops(empty) == flops(held) > 0, name


def flops(profile) -> int:
    return sum(count * op.flops for op, count in profile.ops.items())


@pytest.mark.invariant("PLAN-INV-001")
@pytest.mark.parametrize("family", ["qwen_image", "flux", "sd3", "wan"])
def test_the_peak_is_what_another_counter_finds(family):
    modules = modules_of(family)
    for name, module in modules.items():
        run = run_for(module, "float32", modules["vae"])
        made = real(module)
        tracker = ForwardTracker("cpu")
        other = LiveStorages(made)
        with tracker.watching(made), other:
            run(made, "cpu")
        assert tracker.peak_bytes == other.peak_bytes, name


def test_operations_are_told_by_block():
    modules = components("qwen_image")
    run = run_for(modules["transformer"], "float32", modules["vae"])
    paths = ("transformer_blocks.0", "transformer_blocks.1")
    profile = profile_forward(modules["transformer"], run, block_paths=paths)
    first, second = (profile.block_ops[path] for path in paths)
    assert sum(op.flops * count for op, count in first.items()) > 0
    assert sum(count for op, count in first.items() if op.kind == ATTENTION) == 1
    # the last block of Qwen-Image is like the others
    assert first == second
    assert profile.block_ops[""]


def test_attention_is_one_operation_whatever_the_device_makes_of_it():
    def attend(module, device):
        query = torch.empty(1, 4, 4096, 64, device=device)
        return torch.nn.functional.scaled_dot_product_attention(query, query, query)

    profile = profile_forward(torch.nn.Module(), attend)
    tensor_bytes = 4 * 4096 * 64 * 4
    assert profile.peak_activation_bytes == 2 * tensor_bytes + 4 * 4 * 4096
    ((op, count),) = [(op, n) for op, n in profile.ops.items() if op.kind == ATTENTION]
    assert count == 1
    assert op.flops == 2 * 2 * 4 * 4096 * 4096 * 64


def test_what_is_freed_makes_room():
    def chain(module, device):
        value = torch.zeros(256, device=device)
        for _ in range(10):
            value = value + 1
        return value

    assert profile_forward(torch.nn.Module(), chain).peak_activation_bytes == 2 * 1024


def test_views_take_nothing():
    def look(module, device):
        value = torch.zeros(4, 128, device=device)
        return [value.view(-1), value.t(), value[0], value.transpose(0, 1)]

    assert profile_forward(torch.nn.Module(), look).peak_activation_bytes == 2048


def test_a_tiled_decoder_takes_less():
    module = components("flux")["vae"]
    run = run_for(module, "float32", module)
    whole = profile_forward(module, run).peak_activation_bytes
    module.enable_slicing()
    assert profile_forward(module, run).peak_activation_bytes < whole
