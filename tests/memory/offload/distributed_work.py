"""What one rank does in the tests of distributed offload. Results are plain values."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from omnistage.memory.host.private import PrivateWeights
from omnistage.memory.offload.discovery import streamable_blocks
from omnistage.memory.offload.factory import make_backend
from omnistage.memory.offload.gather import WeightGroup
from omnistage.memory.placement import Placement
from tests.memory.offload.models import Pipeline, built, placed, placement_of, run
from tests.memory.offload.ranks import Rank, counted_memory


@contextmanager
def offloaded(
    rank: Rank, pipeline: Any, placement: Placement, host_weights: Any = None, **settings: bool
) -> Iterator[Any]:
    placement = replace(placement, strategy="distributed-layerwise")
    backend = make_backend(
        placement, host_weights or {}, rank.platform, rank.groups.device, rank.groups, **settings
    )
    backend.enable(pipeline)
    try:
        yield backend
    finally:
        backend.disable()


def shared(rank: Rank, module: Any, **settings: Any) -> Any:
    return offloaded(rank, Pipeline(transformer=module), placed(module), **settings)


def quantized(name: str) -> Any:
    from omnistage.quantization.config import resolve_quantization
    from omnistage.quantization.convert import convert_module, quantized_layers

    module = built(name)
    convert_module(module, resolve_quantization("fp8"), "transformer")
    assert quantized_layers(module)
    return module


def passes(
    rank: Rank,
    name: str,
    residents: tuple[int, ...] = (),
    settings: dict[str, Any] | None = None,
    faults: dict[int, set[int]] | None = None,
    make: Any = built,
) -> Any:
    """(whether three runs equal that without offload, description, bytes locked meanwhile and
    after, copies that overtook compute). `faults`: page locks that are refused, by rank."""
    module = make(name)
    expected = run(module, name)
    rank.platform.refuse_lock = (faults or {}).get(rank.number, set())
    placement = placed(module, residents)
    with offloaded(rank, Pipeline(transformer=module), placement, **(settings or {})) as backend:
        locked_bytes = rank.platform.locked_bytes
        with rank.platform.watching_reads():
            equal = [torch.equal(run(module, name), expected) for _ in range(3)]
        described = backend.describe()
    described["apart"] = sorted(rank.groups._apart)
    return equal, described, (locked_bytes, rank.platform.locked_bytes), rank.platform.overtaken


def forgetful(rank: Rank, forgotten: str) -> bool:
    module = built("qwen")
    expected = run(module, "qwen")
    rank.platform.ignored_waits.add(forgotten)
    with shared(rank, module), rank.platform.watching_reads():
        return torch.equal(run(module, "qwen"), expected)


def two_components(rank: Rank) -> list[bool]:
    """Blocks of both have the same paths."""
    modules = {"transformer": built("wan", 1), "transformer_2": built("wan", 2)}
    expected = [run(one, "wan") for one in modules.values()]
    with offloaded(rank, Pipeline(**modules), placement_of(modules)):
        return [
            torch.equal(run(one, "wan"), wanted)
            for _ in range(2)
            for one, wanted in zip(modules.values(), expected, strict=True)
        ]


def from_checkpoint(rank: Rank, folder: str) -> Any:
    """(equal, locked bytes, bytes of private memory, description), with its files mapped."""
    from diffusers import FluxTransformer2DModel

    from omnistage.memory.host.direct import DirectWeights
    from omnistage.memory.host.layout import host_views
    from omnistage.memory.host.modules import put
    from omnistage.memory.materialize import materialize
    from omnistage.memory.planner import plan_module

    plan = plan_module(FluxTransformer2DModel, Path(folder))
    module = materialize(plan).eval()
    paths = streamable_blocks(module)
    weights = DirectWeights.open(plan, paths)
    for block in weights.blocks.values():
        for name, tensor in host_views(block).items():
            put(module, name, tensor)
    inputs = checkpoint_inputs(module)
    expected = module(**inputs)[0]
    pipeline = Pipeline(transformer=module)
    host_weights = {"transformer": weights}
    with (
        counted_memory() as private_bytes,
        offloaded(rank, pipeline, placed(module), host_weights) as backend,
    ):
        with torch.no_grad():
            equal = [torch.equal(module(**inputs)[0], expected) for _ in range(2)]
        locked_bytes, described = rank.platform.locked_bytes, backend.describe()
    whole = torch.equal(module(**inputs)[0], expected)
    return equal, whole, locked_bytes, sum(private_bytes), described


def checkpoint_inputs(module: Any) -> dict[str, Any]:
    config, seed = module.config, torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, config.in_channels, generator=seed),
        "encoder_hidden_states": torch.randn(1, 5, config.joint_attention_dim, generator=seed),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, generator=seed),
        "timestep": torch.full((1,), 0.5),
        "guidance": torch.ones(1) if config.guidance_embeds else None,
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
        "return_dict": False,
    }


def failing_alike(rank: Rank) -> list[bool]:
    """Runs after passes that ended in the middle on all ranks, in different ways."""
    module = built("qwen")
    expected = run(module, "qwen")
    equal = []
    with shared(rank, module):
        for number in range(6):
            block = module.transformer_blocks[number]

            def fail(*_: Any) -> None:
                raise torch.OutOfMemoryError("injected")

            part = block if number % 2 else block.attn
            handle = part.register_forward_pre_hook(fail)
            try:
                run(module, "qwen")
                equal.append(False)
            except torch.OutOfMemoryError:
                pass
            handle.remove()
            with rank.platform.watching_reads():
                equal.append(torch.equal(run(module, "qwen"), expected))
    assert rank.platform.overtaken == 0
    return equal


def going_wrong(rank: Rank, kind: str) -> Any:
    """Rank 1 does in the second run; the others' error, and how long they waited, in seconds."""
    module = built("qwen")
    expected = run(module, "qwen")

    def wrong(*_: Any) -> None:
        if kind == "raise":
            raise ValueError("injected")
        os.kill(os.getpid(), signal.SIGKILL if kind == "die" else signal.SIGSTOP)

    with shared(rank, module) as backend:
        assert torch.equal(run(module, "qwen"), expected)
        if rank.number == 1:
            module.transformer_blocks[3].register_forward_pre_hook(wrong)
        start_s = time.monotonic()
        try:
            run(module, "qwen")
        except Exception as error:
            waited_s = time.monotonic() - start_s
            again = type(raised(lambda: run(module, "qwen"))).__name__
            slots = [weakref.ref(slot.buffer) for slot in backend._ring._slots]
            found = (type(error).__name__, str(error))
        else:
            return "no error"
    del backend
    gc.collect()
    left = (rank.platform.locked_bytes, [slot() for slot in slots])
    return found, again, waited_s, left


def raised(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def out_of_step(rank: Rank, orders: tuple[tuple[int, ...], ...]) -> Any:
    """Rank i calls blocks in order i."""
    module = built("flux")
    blocks = module.single_transformer_blocks
    with shared(rank, module), torch.no_grad():
        run(module, "flux")
        state, text = torch.ones(1, 16, 32), torch.ones(1, 4, 32)
        for index in orders[rank.number]:
            text, state = blocks[index](state, text, torch.ones(1, 32))
    return "in step"


def different(rank: Rank, what: str) -> Any:
    """Ranks that do not load the same."""
    module = built("qwen" if rank.number == 0 or what == "blocks" else "wan")
    residents = (rank.number,) if what == "blocks" else ()
    expected_hooks = sum(len(one._forward_pre_hooks) for one in module.modules())
    error = raised(
        lambda: offloaded(rank, Pipeline(transformer=module), placed(module, residents)).__enter__()
    )
    hooks = sum(len(one._forward_pre_hooks) for one in module.modules())
    assert hooks == expected_hooks
    assert rank.platform.locked_bytes == 0
    return type(error).__name__, str(error)


def leaving(rank: Rank) -> Any:
    """What is left after `disable`; and whether a module whose blocks are gone is refused."""
    module = built("qwen")
    weights = PrivateWeights.pack(module, streamable_blocks(module))
    regions = weights.memories
    owned = [weakref.ref(memory.mapping) for memory in regions]
    backend = make_backend(
        replace(placed(module), strategy="distributed-layerwise"),
        {"transformer": weights},
        rank.platform,
        "cpu",
        rank.groups,
    )
    backend.enable(Pipeline(transformer=module))
    gc.collect()
    whole_is_gone = [one() is None for one in owned]
    shares = [weakref.ref(memory.mapping) for one in backend._shares for memory in one.memories]
    run(module, "qwen")
    slots = [weakref.ref(slot.buffer) for slot in backend._ring._slots]
    backend.disable()
    backend.disable()
    gc.collect()
    left = [one() for one in (*slots, *shares)]
    refusal = raised(lambda: shared(rank, module).__enter__())
    return whole_is_gone, left, rank.platform.locked_bytes, str(refusal)


def full_device(rank: Rank) -> Any:
    """The device has no memory for slots: the pipeline is as it was, and may be enabled later."""
    from unittest.mock import patch

    module = built("qwen")
    expected = run(module, "qwen")
    target = "omnistage.memory.offload.layerwise.BlockRing"
    with patch(target, side_effect=torch.OutOfMemoryError("injected")):
        error = raised(lambda: shared(rank, module).__enter__())
    untouched = torch.equal(run(module, "qwen"), expected)
    with shared(rank, module):
        return type(error).__name__, untouched, torch.equal(run(module, "qwen"), expected)


def passes_on_gpu(rank: Rank, name: str, use_allgather: bool) -> Any:
    """(whether runs equal those of the resident model, description, device bytes left)."""
    device, module = rank.groups.device, built(name)
    expected = run(module.to(device), name, device=device)
    module.to("cpu")
    gc.collect()
    before_bytes = torch.cuda.memory_allocated(device)
    with shared(rank, module, use_allgather=use_allgather) as backend:
        equal = [torch.equal(run(module, name, device=device), expected) for _ in range(3)]
        described = backend.describe()
    gc.collect()
    return equal, described, torch.cuda.memory_allocated(device) - before_bytes


def alone_on_gpu(rank: Rank) -> str:
    """Rank 1 makes a pass that rank 0 does not."""
    module = built("qwen")
    with shared(rank, module):
        run(module, "qwen", steps=1 + rank.number, device=rank.groups.device)
    return "in step"


def lone_group(device_group: Any) -> WeightGroup:
    """As a `WeightGroup`, of one rank, which ranks alone never make."""
    group = object.__new__(WeightGroup)
    group._device_group = group._host_group = device_group
    group._on_gpu, group._loss, group._abandoned = True, None, False
    return group
