"""Input keys: each ingredient counts, and nothing else does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from omnistage.config.resolved import ParallelConfig
from omnistage.memory.cache import identity
from omnistage.memory.cache.identity import (
    RankShare,
    ingredients_of,
    input_key,
    plain_config,
    summary,
)
from omnistage.memory.checkpoint import read_header
from omnistage.memory.host.layout import BlockLayout, image_layout
from omnistage.memory.plan import LoadPlan, Skeleton, SourceKind, TensorSource
from omnistage.parallel.topology import Topology

MTIME_NS = 1_700_000_000_123_456_789


class Tiny:
    """Stands for a model's class: an identity looks at its name only."""


class Other:
    pass


def write(folder: Path, *, seed: int = 0, mtime_ns: int = MTIME_NS, **metadata: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"blocks.{i}.weight": torch.randn(8, 8, generator=generator) for i in range(2)}
    save_file(tensors, path, metadata or None)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def make_plan(
    file: Path, *, dtype: str = "bfloat16", cls: type = Tiny, **settings: Any
) -> LoadPlan:
    config = {"layers": 2, "_name_or_path": str(file.parent)} | settings
    sources = {
        name: TensorSource(
            kind=SourceKind.CHECKPOINT,
            shape=stored.shape,
            dtype=dtype,
            device="cpu",
            file=file,
            key=name,
            offset_bytes=stored.offset_bytes,
            stored_dtype=stored.dtype,
        )
        for name, stored in read_header(file).items()
    }
    return LoadPlan(
        component="transformer",
        cls=cls,
        library="diffusers",
        folder=file.parent,
        device="cpu",
        dtype=dtype,
        sources=sources,
        skeleton=Skeleton(cls, config, file.parent, dtype),
    )


def make_layouts(plan: LoadPlan, count: int = 2) -> list[BlockLayout]:
    made = []
    for index in range(count):
        name = f"blocks.{index}.weight"
        places, nbytes = image_layout({name: (plan.sources[name].shape, plan.dtype)})
        made.append(BlockLayout(path=f"blocks.{index}", places=places, nbytes=nbytes))
    return made


def key_of(
    plan: LoadPlan,
    layouts: list[BlockLayout] | None = None,
    transform: str | None = None,
    share: RankShare | None = None,
) -> str:
    made = make_layouts(plan) if layouts is None else layouts
    return input_key(ingredients_of(plan, made, transform, share or RankShare()))


def another_size(plan: LoadPlan, file: Path) -> str:
    with file.open("ab") as output:
        output.write(b"\0")
    os.utime(file, ns=(MTIME_NS, MTIME_NS))
    return key_of(plan)


def another_time(plan: LoadPlan, file: Path) -> str:
    os.utime(file, ns=(MTIME_NS, MTIME_NS + 1))
    return key_of(plan)


def another_header(plan: LoadPlan, file: Path) -> str:
    write(file.parent, note="x")
    return key_of(make_plan(file))


def other_weights_of_the_same_size_and_time(plan: LoadPlan, file: Path) -> str:
    before = file.stat()
    write(file.parent, seed=1)
    after = file.stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return key_of(make_plan(file))


def another_name_of_the_file(plan: LoadPlan, file: Path) -> str:
    return key_of(make_plan(file.rename(file.with_name("other.safetensors"))))


def another_source(plan: LoadPlan, file: Path) -> str:
    name = "blocks.0.weight"
    changed = replace(plan.sources[name], key="blocks.1.weight")
    return key_of(replace(plan, sources={**plan.sources, name: changed}))


def a_cast_of_one_tensor(plan: LoadPlan, file: Path) -> str:
    name = "blocks.0.weight"
    changed = replace(plan.sources[name], dtype="float32")
    return key_of(replace(plan, sources={**plan.sources, name: changed}), make_layouts(plan))


def other_places(plan: LoadPlan, file: Path) -> str:
    first, second = make_layouts(plan)
    (place,) = first.places
    moved = replace(first, places=(replace(place, offset_bytes=256),), nbytes=first.nbytes + 256)
    return key_of(plan, [moved, second])


CHANGES: dict[str, Callable[[LoadPlan, Path], str]] = {
    "dtype": lambda plan, file: key_of(make_plan(file, dtype="float16")),
    "cast": a_cast_of_one_tensor,
    "class": lambda plan, file: key_of(make_plan(file, cls=Other)),
    "config": lambda plan, file: key_of(make_plan(file, layers=3)),
    "nested config": lambda plan, file: key_of(make_plan(file, rope={"base": [1, 2.5]})),
    "size": another_size,
    "time": another_time,
    "header": another_header,
    "bytes": other_weights_of_the_same_size_and_time,
    "file name": another_name_of_the_file,
    "source": another_source,
    "fewer blocks": lambda plan, file: key_of(plan, make_layouts(plan, 1)),
    "order of blocks": lambda plan, file: key_of(plan, make_layouts(plan)[::-1]),
    "places": other_places,
    "quantization": lambda plan, file: key_of(plan, transform="fp8 row v1"),
    "tensor-parallel size": lambda plan, file: key_of(
        plan, share=RankShare(tensor_parallel_size=2)
    ),
    "tensor-parallel rank": lambda plan, file: key_of(
        plan, share=RankShare(tensor_parallel_size=2, tensor_parallel_rank=1)
    ),
    "sequence implementation": lambda plan, file: key_of(
        plan, share=RankShare(sequence_parallel="ring=2", sequence_parallel_size=2)
    ),
    "sequence size": lambda plan, file: key_of(plan, share=RankShare(sequence_parallel_size=2)),
}


@pytest.mark.invariant("CACHE-INV-008")
def test_every_ingredient_gives_a_key_of_its_own(tmp_path: Path) -> None:
    found = {}
    for index, (name, change) in enumerate(CHANGES.items()):
        file = write(tmp_path / str(index))
        plan = make_plan(file)
        original = key_of(plan)
        assert found.setdefault("unchanged", original) == original
        found[name] = change(plan, file)
    assert len(set(found.values())) == len(CHANGES) + 1


@pytest.mark.invariant("CACHE-INV-008")
def test_versions_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(write(tmp_path / "a"))
    before = key_of(plan)
    monkeypatch.setattr(identity.metadata, "version", lambda name: "0.0")
    others = key_of(plan)
    monkeypatch.setattr(identity, "__version__", "0.0")
    ours = key_of(plan)
    monkeypatch.setattr(identity, "FORMAT", 0)
    assert len({before, others, ours, key_of(plan)}) == 4


@pytest.mark.invariant("CACHE-INV-008")
def test_where_the_files_lie_does_not_count(tmp_path: Path) -> None:
    file = write(tmp_path / "a")
    expected = key_of(make_plan(file))
    copy, link, symbolic = (tmp_path / name for name in "bcd")
    shutil.copytree(tmp_path / "a", copy)
    link.mkdir()
    os.link(file, link / file.name)
    symbolic.mkdir()
    (symbolic / file.name).symlink_to(file)
    for folder in (copy, link, symbolic):
        assert key_of(make_plan(folder / file.name)) == expected


@pytest.mark.invariant("CACHE-INV-008")
def test_ranks_that_hold_the_same_weights_have_one_key() -> None:
    def shares(**sizes: int) -> set[RankShare]:
        topology = Topology.of(ParallelConfig(**sizes))
        return {RankShare.of(topology, rank) for rank in range(topology.world_size)}

    assert shares(data_parallel_size=4) == shares() == {RankShare()}
    assert len(shares(sequence_parallel_size=4)) == 1
    assert shares(sequence_parallel_size=4) != shares()
    assert shares(sequence_parallel_size=2) != shares(ring_parallel_size=2)
    assert shares(data_parallel_size=2, tensor_parallel_size=2) == shares(tensor_parallel_size=2)
    assert len(shares(tensor_parallel_size=4)) == 4


def test_a_summary_is_short_and_says_what_changed(tmp_path: Path) -> None:
    plan = make_plan(write(tmp_path / "a"))
    ingredients = ingredients_of(plan, make_layouts(plan), None, RankShare())
    short = summary(ingredients)
    assert short["files"] == ingredients["files"]
    assert {len(short[name]) for name in ("config", "sources", "layouts")} == {64}


def test_a_file_that_only_a_library_reads_is_sampled_too(tmp_path: Path) -> None:
    file = write(tmp_path / "a")
    plan = replace(make_plan(file), sources={}, gguf_file=file)
    before = key_of(plan, [])
    write(tmp_path / "a", seed=1)
    assert key_of(plan, []) != before


@pytest.mark.parametrize("kind", [set, frozenset])
def test_the_order_of_a_set_does_not_count(kind: type) -> None:
    one, other = kind([0, 8]), kind([8, 0])
    assert list(one) != list(other)
    assert input_key(plain_config({"kept": one})) == input_key(plain_config({"kept": other}))
    assert plain_config({"kept": kind({"b", "a", 1, None})}) == {"kept": ["a", "b", 1, None]}
