"""Weights shared by ranks on GPUs of their own, gathered by NCCL: needs two. With one, all that is
shown is that a gather in place follows the stream that it is started on."""

from __future__ import annotations

import pytest
import torch

from omnistage.parallel.rendezvous import Rendezvous, connect
from omnistage.platforms.registry import platform_of
from tests.memory.offload import distributed_work as work
from tests.memory.offload.ranks import on_ranks

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices, {GPUS} there")
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")


@two_gpus
@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-001")
@pytest.mark.parametrize("use_allgather", [True, False])
@pytest.mark.parametrize("name", ["qwen", "flux"])
def test_streamed_equals_resident_bit_for_bit(name, use_allgather):
    for result in on_ranks(work.passes_on_gpu, name, use_allgather, device="cuda"):
        equal, described, left_bytes = result
        assert equal == [True] * 3
        assert described["shares"] == (2 if use_allgather else 1)
        assert described["page_locked"]
        assert left_bytes <= 0


@two_gpus
@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-005")
def test_a_rank_that_makes_a_pass_alone_fails_in_time():
    first, second = on_ranks(work.alone_on_gpu, deadline_s=5.0, device="cuda")
    assert first == "in step"
    assert second[0] == "StageLostError"


@one_gpu
def test_a_gather_in_place_follows_its_stream():
    import torch.distributed as dist

    platform, device = platform_of("cuda:0"), "cuda:0"
    rendezvous = Rendezvous(30.0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=connect(rendezvous.address, 30.0), rank=0, world_size=1
    )
    try:
        group = work.lone_group(dist.new_group([0]))
        slot = torch.zeros(2**20, dtype=torch.uint8, device=device)
        host = torch.arange(2**20).to(torch.uint8).pin_memory()
        copies, filled = platform.stream(device), platform.event(device)
        with platform.stream_scope(copies):
            platform.upload(slot, host)
            platform.enqueue(lambda: group.gather(slot, slot))
            filled.record(copies)
        filled.wait(platform.current_stream(device))
        assert torch.equal(slot.cpu(), host)
        group.abandon()
    finally:
        dist.destroy_process_group()
        rendezvous.close()
