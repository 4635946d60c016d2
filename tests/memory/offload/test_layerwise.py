"""Streamed equals resident, bit for bit, whatever happens in between; and all is undone."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.memory.host.private import PrivateWeights
from omnistage.memory.offload.discovery import streamable_blocks
from omnistage.memory.offload.factory import make_backend
from omnistage.memory.offload.none import NoOffload
from omnistage.memory.placement import ComponentPlacement, Placement, Residency
from omnistage.platforms.cpu import CpuPlatform
from tests.memory.offload.models import MODELS, Pipeline, built, placed, placement_of, run


@contextmanager
def offloaded(platform, pipeline, placement, host_weights=None):
    backend = make_backend(placement, host_weights or {}, platform, "cpu")
    backend.enable(pipeline)
    try:
        yield backend
    finally:
        backend.disable()


def residencies(module):
    count = len(streamable_blocks(module))
    return [(), tuple(range(0, count, 2)), (0, 1), tuple(range(1, count)), tuple(range(count))]


@pytest.mark.invariant("OFFLOAD-INV-002")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_streamed_equals_resident_bit_for_bit(platform, name, batch):
    module = built(name)
    expected = run(module, name, batch)
    assert expected.abs().max() > 0.5
    for residents in residencies(module):
        placement = placed(module, residents)
        pipeline = Pipeline(transformer=module)
        with offloaded(platform, pipeline, placement), platform.watching_reads():
            assert torch.equal(run(module, name, batch), expected), residents
    assert platform.uploads > 0
    assert platform.overtaken == 0
    assert platform.locked_bytes == 0


@pytest.mark.invariant("OFFLOAD-INV-002")
@pytest.mark.parametrize("forgotten", ["compute", "copy"])
def test_a_forgotten_wait_is_seen(platform, forgotten):
    module = built("qwen")
    expected = run(module, "qwen")
    platform.ignored_waits.add(forgotten)
    with offloaded(platform, Pipeline(transformer=module), placed(module)):
        with platform.watching_reads():
            found = run(module, "qwen")
        assert not torch.equal(found, expected)
        assert found.isnan().any()


@pytest.mark.parametrize("name", ["qwen", "flux"])
def test_what_is_not_page_locked_is_staged(platform, name):
    module = built(name)
    expected = run(module, name)
    placement = placed(module, page_lock_limit_bytes=0)
    with offloaded(platform, Pipeline(transformer=module), placement) as backend:
        staging_bytes = platform.locked_bytes
        assert 0 < staging_bytes <= 2 * (backend.describe()["slot_bytes"] + 4096)
        with platform.watching_reads():
            assert torch.equal(run(module, name), expected)
        assert platform.unlocked_uploads == 0
        described = backend.describe()
        assert (described["page_locked"], described["staging"]) == (False, "in use")
        assert described["components"]["transformer"]["locked_bytes"] == 0
    assert platform.locked_bytes == 0


def test_where_nothing_can_be_locked_copies_are_plain_and_that_is_said(platform, caplog):
    module = built("qwen")
    expected = run(module, "qwen")
    platform.refuse_lock = {1, 2}
    with offloaded(platform, Pipeline(transformer=module), placed(module)) as backend:
        assert torch.equal(run(module, "qwen"), expected)
        assert backend.describe()["staging"] == "refused"
    assert platform.unlocked_uploads > 0
    assert caplog.text.count("were refused on cpu") == 1


def test_what_is_page_locked_is_said_by_component(platform):
    modules = {"transformer": built("qwen"), "transformer_2": built("flux")}
    one = Pipeline(transformer=modules["transformer"])
    with offloaded(platform, one, placed(modules["transformer"])):
        first_bytes = platform.locked_bytes
    placement = placement_of(modules, page_lock_limit_bytes=first_bytes)
    with offloaded(platform, Pipeline(**modules), placement) as backend:
        described = backend.describe()
        staging_bytes = platform.locked_bytes - first_bytes
        assert staging_bytes > 0
    assert (described["page_locked"], described["staging"]) == (False, "in use")
    components = described["components"].values()
    assert [one["page_locked"] for one in components] == [True, False]
    assert [one["locked_bytes"] for one in components] == [first_bytes, 0]


def test_nothing_is_staged_of_what_is_page_locked(platform):
    module = built("qwen")
    with offloaded(platform, Pipeline(transformer=module), placed(module)) as backend:
        described = backend.describe()
        assert (described["page_locked"], described["staging"]) == (True, "not needed")
        assert described["components"]["transformer"]["locked_bytes"] == platform.locked_bytes > 0


@pytest.mark.invariant("OFFLOAD-INV-003")
def test_disabling_restores_everything(platform):
    module, vae = built("flux"), nn.Conv2d(1, 1, 1)
    before = {name: (id(one), one.clone(), one.device) for name, one in module.named_parameters()}
    hooks = [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in module.modules()]
    backend = make_backend(placed(module), {}, platform, "cpu")
    for _ in range(2):
        backend.enable(Pipeline(transformer=module, vae=vae))
        assert backend.is_enabled
        run(module, "flux")
        backend.disable()
        backend.disable()
        assert not backend.is_enabled
    for name, parameter in module.named_parameters():
        identity, value, device = before[name]
        assert (id(parameter), parameter.device) == (identity, device)
        assert torch.equal(parameter, value)
    assert hooks == [
        (len(one._forward_hooks), len(one._forward_pre_hooks)) for one in module.modules()
    ]


@pytest.mark.invariant("OFFLOAD-INV-003")
def test_between_passes_tensors_are_the_hosts(platform):
    module = built("qwen")
    weight = module.transformer_blocks[0].attn.to_q.weight
    value = weight.clone()
    with offloaded(platform, Pipeline(transformer=module), placed(module)):
        host = weight.data_ptr()
        run(module, "qwen")
        assert weight is module.transformer_blocks[0].attn.to_q.weight
        assert weight.data_ptr() == host
        assert torch.equal(weight, value)


@pytest.mark.invariant("OFFLOAD-INV-004")
def test_nothing_is_left(platform):
    module = built("qwen")
    backend = make_backend(placed(module), {}, platform, "cpu")
    backend.enable(Pipeline(transformer=module))
    run(module, "qwen")
    slots = [weakref.ref(slot.buffer) for slot in backend._ring._slots]
    ring = weakref.ref(backend._ring)
    assert platform.locked_bytes > 0
    backend.disable()
    gc.collect()
    assert [slot() for slot in slots] == [None, None]
    assert ring() is None
    assert platform.locked_bytes == 0


@pytest.mark.invariant("OFFLOAD-INV-005")
@pytest.mark.parametrize("at", ["block", "upload", "check"])
def test_after_a_pass_that_broke_off_the_next_is_right(platform, at):
    module = built("qwen")
    expected = run(module, "qwen")
    weights = PrivateWeights.pack(module, streamable_blocks(module))
    with offloaded(
        platform, Pipeline(transformer=module), placed(module), {"transformer": weights}
    ):
        run(module, "qwen", steps=1)
        for number in range(1, 8):
            with pytest.raises(torch.OutOfMemoryError), broken(platform, module, at, number):
                run(module, "qwen")
            with platform.watching_reads():
                assert torch.equal(run(module, "qwen"), expected)
    assert platform.overtaken == 0


@contextmanager
def broken(platform, module, at, number):
    """The next pass ends at its `number`th upload, or in the middle of a block."""
    error = torch.OutOfMemoryError("injected")
    if at == "upload":
        platform.fail_upload[platform.uploads + number] = error
        yield
        return

    def fail(*_):
        raise error

    part = module.transformer_blocks[number % 6]
    handle = (part.attn if at == "block" else part).register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.invariant("OFFLOAD-INV-005")
def test_blocks_may_be_skipped_repeated_and_reversed(platform):
    module = built("flux")
    blocks = list(module.single_transformer_blocks)

    def walk(order):
        state, text = torch.ones(1, 16, 32), torch.ones(1, 4, 32)
        with torch.no_grad():
            for index in order:
                text, state = blocks[index](state, text, torch.ones(1, 32))
        return state

    orders = [(0, 2), (1, 1, 0, 0), (2, 1, 0), (0, 0, 2, 2, 1)]
    expected = [walk(order) for order in orders]
    with offloaded(platform, Pipeline(transformer=module), placed(module)):
        with platform.watching_reads():
            for order, wanted in zip(orders, expected, strict=True):
                assert torch.equal(walk(order), wanted), order
        assert torch.equal(run(module, "flux"), run(module, "flux"))
    assert platform.overtaken == 0


def test_components_share_two_slots(platform):
    first, second = built("qwen"), built("sd3")
    expected = run(first, "qwen"), run(second, "sd3")
    modules = {"transformer": first, "transformer_2": second}
    with offloaded(platform, Pipeline(**modules), placement_of(modules)) as backend:
        for _ in range(2):
            assert torch.equal(run(first, "qwen", steps=3), expected[0])
            assert torch.equal(run(second, "sd3", steps=3), expected[1])
        assert len(backend._ring._slots) == 2
        assert set(backend.describe()["components"]) == set(modules)


@pytest.mark.invariant("OFFLOAD-INV-001")
def test_two_pipelines_live_side_by_side_and_each_has_one_owner(platform):
    first, second = built("qwen", 1), built("qwen", 2)
    expected = run(first, "qwen"), run(second, "qwen")
    with (
        offloaded(platform, Pipeline(transformer=first), placed(first)),
        offloaded(platform, Pipeline(transformer=second), placed(second)),
    ):
        assert torch.equal(run(first, "qwen"), expected[0])
        assert torch.equal(run(second, "qwen"), expected[1])
        other = make_backend(placed(first), {}, platform, "cpu")
        with pytest.raises(ConfigurationError, match="owned by offload 'layerwise'"):
            other.enable(Pipeline(transformer=first))
        assert torch.equal(run(first, "qwen"), expected[0])
    other.enable(Pipeline(transformer=first))
    other.disable()


def test_a_pipeline_that_is_gone_is_let_go(platform):
    module = built("qwen")
    backend = make_backend(placed(module), {}, platform, "cpu")
    backend.enable(Pipeline(transformer=module, vae=nn.Conv2d(1, 1, 1)))
    backend.disable()
    backend.enable(Pipeline(transformer=module))
    backend.disable()


def test_steady_passes_copy_every_streamed_block_once_and_in_time(platform):
    module = built("qwen")
    with offloaded(platform, Pipeline(transformer=module), placed(module, (0, 3))) as backend:
        run(module, "qwen", steps=1)
        before = backend.describe()
        run(module, "qwen", steps=5)
        after = backend.describe()
        assert after["fetches"] - before["fetches"] == 5 * 4
        assert after["late_fetches"] == before["late_fetches"] == 1
        copied = before["components"]["transformer"]["streamed_bytes"]
        assert after["fetched_bytes"] - before["fetched_bytes"] == 5 * copied


def test_two_streamed_blocks_stay_in_their_slots(platform):
    module = built("qwen")
    with offloaded(platform, Pipeline(transformer=module), placed(module, (0, 1, 2, 3))) as backend:
        run(module, "qwen", steps=4)
        assert backend.describe()["fetches"] == 2


def test_host_weights_of_the_loader_are_used_and_closed(platform):
    module = built("qwen")
    expected = run(module, "qwen")
    weights = PrivateWeights.pack(module, streamable_blocks(module), platform, "cpu")
    with offloaded(
        platform, Pipeline(transformer=module), placed(module), {"transformer": weights}
    ):
        assert torch.equal(run(module, "qwen"), expected)
    assert platform.locked_bytes == 0
    assert not weights.blocks
    assert torch.equal(run(module, "qwen"), expected)


@pytest.mark.parametrize("enabled_inside", [True, False])
def test_calls_may_be_in_inference_mode_or_not(platform, enabled_inside):
    module = built("qwen")
    expected = run(module, "qwen")
    backend = make_backend(placed(module, (2,)), {}, platform, "cpu")
    with torch.inference_mode(enabled_inside):
        backend.enable(Pipeline(transformer=module))
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            assert torch.equal(run(module, "qwen"), expected)
    backend.disable()
    assert not any(one.is_inference() for one in module.parameters())
    assert torch.equal(run(module, "qwen"), expected)


def test_a_streamed_block_is_not_trained(platform):
    module = built("qwen").requires_grad_(True)
    with offloaded(platform, Pipeline(transformer=module), placed(module)):
        with pytest.raises(UnsupportedCombinationError, match="cannot be trained"):
            module(**MODELS["qwen"].inputs(1))
        run(module, "qwen")


@pytest.mark.invariant("OFFLOAD-INV-006")
class TestRefusals:
    """Each leaves the pipeline as it was."""

    @pytest.fixture
    def module(self):
        module = built("qwen")
        expected = run(module, "qwen")
        yield module
        assert not any(one._forward_pre_hooks for one in module.modules())
        if not any(one.is_meta for one in module.parameters()):
            assert torch.equal(run(module, "qwen"), expected)

    def refused(self, platform, module, placement, error, words, host_weights=None):
        backend = make_backend(placement, host_weights or {}, platform, "cpu")
        with pytest.raises(error, match=words):
            backend.enable(Pipeline(transformer=module))
        assert not backend.is_enabled
        backend.disable()
        assert platform.locked_bytes == 0

    def test_a_device_without_offload(self, module):
        words = "host and device memory are the same"
        self_platform = CpuPlatform()
        backend = make_backend(placed(module), {}, self_platform, "cpu")
        with pytest.raises(UnsupportedCombinationError, match=words):
            backend.enable(Pipeline(transformer=module))

    def test_an_unknown_block(self, platform, module):
        placement = self._streaming("transformer_blocks.9")
        self.refused(platform, module, placement, ConfigurationError, "no block")

    def test_an_unknown_component(self, platform, module):
        placement = placement_of({"transfomer": module})
        self.refused(platform, module, placement, ConfigurationError, "no module at 'transfomer'")

    def test_a_block_inside_another(self, platform, module):
        placement = self._streaming("transformer_blocks.0", "transformer_blocks.0.attn")
        self.refused(platform, module, placement, ConfigurationError, "part of another")

    def test_tied_tensors(self, platform):
        module = built("qwen")
        blocks = module.transformer_blocks
        blocks[1].attn.to_q.weight = blocks[0].attn.to_q.weight
        self.refused(
            platform, module, placed(module), UnsupportedCombinationError, "tensor of the block"
        )

    def test_tensor_subclasses(self, platform):
        class Quantized(torch.Tensor):
            pass

        module = built("qwen")
        weight = module.transformer_blocks[0].attn.to_q.weight.data.as_subclass(Quantized)
        module.transformer_blocks[0].attn.to_q.weight = nn.Parameter(weight, requires_grad=False)
        self.refused(
            platform, module, placed(module), UnsupportedCombinationError, "only plain tensors"
        )

    def test_swapped_components(self, platform, module):
        component = ComponentPlacement(
            component="transformer", residency=Residency.SWAPPED, weight_bytes=1
        )
        placement = Placement(strategy="layerwise", components={"transformer": component})
        self.refused(platform, module, placement, UnsupportedCombinationError, "swapped")

    def test_host_weights_that_do_not_fit(self, platform, module):
        other = built("wan")
        weights = {"transformer": PrivateWeights.pack(other, streamable_blocks(other))}
        self.refused(
            platform, module, placed(module), ConfigurationError, "no host weights for", weights
        )

    def test_a_device_that_is_full(self, platform, module, monkeypatch):
        def full(*_, **__):
            raise torch.OutOfMemoryError("injected")

        monkeypatch.setattr("omnistage.memory.offload.layerwise.BlockRing", full)
        self.refused(platform, module, placed(module), torch.OutOfMemoryError, "injected")

    def _streaming(self, *paths):
        component = ComponentPlacement(
            component="transformer",
            residency=Residency.STREAMED,
            weight_bytes=1,
            streamed_blocks=paths,
        )
        return Placement(strategy="layerwise", components={"transformer": component})


def test_strategies_have_their_backends(platform):
    empty = Placement(strategy="none", components={})
    assert isinstance(make_backend(empty, {}, platform, "cpu"), NoOffload)
    with pytest.raises(ConfigurationError, match="nearest: layerwise"):
        make_backend(Placement(strategy="layrwise", components={}), {}, platform, "cpu")
