"""A pipeline loaded through the cache: ordinarily once, then from the cache, always the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.cache import runtime, writer
from omnistage.memory.cache.identity import RankShare
from omnistage.memory.cache.runtime import RuntimeCache
from omnistage.memory.materialize import TensorFiles
from omnistage.memory.offload.host import HostBacking
from omnistage.memory.pipeline_loader import load_pipeline, plan_pipeline
from tests.checkpoints import checkpoint
from tests.memory.cache.test_damage import flip, shard, truncated
from tests.memory.comparing import pipeline_differences
from tests.memory.host.placing import blocks_of, streaming
from tests.memory.offload.fake_device import late_device
from tests.memory.test_equality import reference

FAMILY = "flux"
DTYPE = "bfloat16"  # a cast: the checkpoint's own files cannot serve


def load(folder: Path, **options: Any) -> Any:
    plan = plan_pipeline(checkpoint(FAMILY), dtype=DTYPE)
    cache = RuntimeCache.at(str(folder), **options)
    return load_pipeline(plan, placement=streaming(blocks_of(plan, FAMILY)), cache=cache)


def check_equal(loaded: Any) -> None:
    assert pipeline_differences(loaded.pipeline, reference(checkpoint(FAMILY), DTYPE)) == []


def backing_of(loaded: Any) -> HostBacking:
    return loaded.host_weights["transformer"].backing


def entry_folder(loaded: Any) -> Path:
    return loaded.host_weights["transformer"].entry.folder


@pytest.mark.invariant("CACHE-INV-001")
def test_a_second_start_reads_no_block_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(tmp_path)
    assert backing_of(first) is HostBacking.RUNTIME_CACHE
    check_equal(first)
    folder = entry_folder(first)
    first.close()

    read: list[str] = []
    original = TensorFiles.read

    def watched(self: Any, file: Any, key: str, *rest: Any, **named: Any) -> Any:
        read.append(key)
        return original(self, file, key, *rest, **named)

    monkeypatch.setattr(TensorFiles, "read", watched)
    second = load(tmp_path)
    assert entry_folder(second) == folder
    assert read
    assert not [key for key in read if "transformer_blocks." in key]
    check_equal(second)
    for path in second.host_weights["transformer"].blocks:
        second.host_weights["transformer"].check(path)
    second.close()


@pytest.mark.invariant("CACHE-INV-003")
def test_ranks_with_other_shares_have_other_keys_and_share_equal_bytes(tmp_path: Path) -> None:
    first = load(tmp_path)
    second = load(tmp_path, share=RankShare(sequence_parallel="sequence=2"))
    assert entry_folder(first) == entry_folder(second)
    assert len(list(tmp_path.glob("weights/index/*.json"))) == 2
    first.close()
    second.close()


@pytest.mark.invariant("CACHE-INV-004")
def test_damage_ends_in_an_ordinary_load(tmp_path: Path) -> None:
    first = load(tmp_path)
    folder = entry_folder(first)
    first.close()
    truncated(folder)
    second = load(tmp_path)
    check_equal(second)
    second.close()
    flip(shard(folder), shard(folder).stat().st_size - 300)
    third = load(tmp_path)
    weights = third.host_weights["transformer"]
    last = list(weights.blocks)[-1]
    with pytest.raises(CheckpointError, match="start again"):
        weights.check(last)
    third.close()
    fourth = load(tmp_path)
    check_equal(fourth)
    fourth.close()


CASES = ("a file in the way", "unreadable", "read-only", "too small", "broken")


@pytest.mark.invariant("CACHE-INV-005")
@pytest.mark.parametrize("case", CASES)
def test_a_cache_that_cannot_be_used_costs_one_warning(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {}
    if case == "a file in the way":
        tmp_path = tmp_path / "file"
        tmp_path.write_text("")
    elif case == "unreadable":
        monkeypatch.setattr(Path, "read_bytes", _refused)
    elif case == "read-only":

        def read_only(*_: object, **__: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(Path, "mkdir", read_only)
    elif case == "too small":
        options = {"limit_gib": 1e-6}
    else:
        monkeypatch.setattr(writer, "image_chunks", _fails)
    loaded = load(tmp_path, **options)
    assert backing_of(loaded) is HostBacking.PRIVATE
    check_equal(loaded)
    loaded.close()
    warnings = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1, caplog.text
    assert "as without it" in caplog.text


def _refused(path: Path) -> bytes:
    if "weights/index" in str(path):
        raise PermissionError(13, "Permission denied")
    return path.open("rb").read()


def _fails(block: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_entry_of_another_layout_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if two layouts had one key."""
    monkeypatch.setattr(runtime, "input_key", lambda ingredients: "a" * 64)
    load(tmp_path).close()
    plan = plan_pipeline(checkpoint(FAMILY), dtype="float16")
    cache = RuntimeCache.at(str(tmp_path))
    loaded = load_pipeline(plan, placement=streaming(blocks_of(plan, FAMILY)), cache=cache)
    assert "another layout" in caplog.text
    assert backing_of(loaded) is HostBacking.RUNTIME_CACHE
    assert pipeline_differences(loaded.pipeline, reference(checkpoint(FAMILY), "float16")) == []
    loaded.close()


def test_its_files_are_page_locked_as_one_range_each(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    weights = loaded.host_weights["transformer"]
    with late_device() as platform:
        assert not weights.page_lock(platform, "cpu", 1000)
        assert weights.page_lock(platform, "cpu", None)
        assert weights.is_page_locked
        assert weights.locked_bytes >= sum(block.nbytes for block in weights.blocks.values())
        loaded.close()
        assert not weights.is_page_locked
