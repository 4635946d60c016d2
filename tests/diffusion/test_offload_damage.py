"""A damaged entry of the weight cache, found while a stage that streams from it is serving."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from omnistage.contracts.errors import StageLostError
from omnistage.memory.cache.entry import Entry
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver, diffusion_request
from tests.diffusion.reference import same_bits
from tests.memory.offload.fake_device import late_device

ASKED = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt", "seed": 7}


@contextmanager
def serving(**settings):
    driver = Driver(checkpoint("qwen_image"), **settings)
    try:
        yield driver
    finally:
        driver.executor.close()


def spoil(entry: Entry) -> None:
    block = entry.manifest.blocks[-1]
    path = entry.folder / block.file
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(block.offset_bytes + block.nbytes // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


@pytest.mark.invariant("CACHE-INV-004")
def test_the_stage_goes_and_the_next_one_loads_from_the_checkpoint(tmp_path):
    settings = {
        "offload": "layerwise",
        "memory": "minimal",
        "dlo_runtime_cache": "on",
        "weight_cache_dir": str(tmp_path),
    }

    def host(driver):
        return driver.description["offload"]["components"]["transformer"]["host"]

    with late_device():
        with serving(offload="none") as driver:
            expected = driver.run(diffusion_request(**ASKED)).tensors["images"]
        with serving(**settings):
            entries = [Entry.read(one) for one in (tmp_path / "weights" / "entries").iterdir()]
        (entry,) = [one for one in entries if one.manifest.component == "transformer"]
        spoil(entry)
        with serving(**settings) as driver:
            assert host(driver) == "runtime_cache"
            with pytest.raises(StageLostError, match="damaged") as raised:
                driver.run(diffusion_request(**ASKED))
            assert "differs from its digest" in raised.value.detail
            assert not entry.folder.exists()
        with serving(**settings) as driver:
            found = driver.run(diffusion_request(**ASKED)).tensors["images"]
            assert same_bits(found, expected)
        assert Entry.read(entry.folder).manifest.component == "transformer"
