"""Whole pipelines of diffusers with their denoiser and their encoders streamed through one ring."""

from __future__ import annotations

import pytest

from omnistage.memory.offload.discovery import find_components
from omnistage.memory.offload.factory import make_backend
from tests.checkpoints import FAMILIES, checkpoint
from tests.diffusion.reference import reference_images, reference_pipeline, same_bits
from tests.memory.offload.models import Pipeline, built, placement_of


@pytest.mark.invariant("OFFLOAD-INV-002")
@pytest.mark.parametrize("name", ["qwen_image", "flux", "sd15", "sd3"])
def test_pictures_are_the_same(platform, name):
    pipeline, call = reference_pipeline(checkpoint(name)), FAMILIES[name].call
    expected = reference_images(pipeline, call, 5, "latent")
    assert expected.abs().max() > 0.5
    found = find_components(pipeline)
    placement = placement_of(found.denoisers | found.encoders)
    streaming = [one.component for one in placement.components.values() if one.streamed_blocks]
    assert len(streaming) >= 2
    backend = make_backend(placement, {}, platform, "cpu")
    backend.enable(pipeline)
    with platform.watching_reads():
        for _ in range(2):
            assert same_bits(reference_images(pipeline, call, 5, "latent"), expected)
    backend.disable()
    assert platform.overtaken == 0
    assert platform.locked_bytes == 0
    assert same_bits(reference_images(pipeline, call, 5, "latent"), expected)


def test_page_locks_of_all_components_keep_to_the_limit_by_whole_pages(platform):
    """Images are shorter than the pages they lie in: a byte too little is too little."""
    modules = {"transformer": built("wan", 1), "transformer_2": built("wan", 2)}

    def locked_bytes(limit_bytes):
        placement = placement_of(modules, page_lock_limit_bytes=limit_bytes)
        backend = make_backend(placement, {}, platform, "cpu")
        backend.enable(Pipeline(**modules))
        found = platform.locked_bytes, backend.describe()["page_locked"]
        backend.disable()
        return found

    all_bytes, locked = locked_bytes(None)
    assert locked
    copied_bytes = sum(one.nbytes for m in modules.values() for one in m.blocks.parameters())
    assert copied_bytes % 4096
    assert locked_bytes(all_bytes) == (all_bytes, True)
    assert not locked_bytes(all_bytes - 1)[1]
