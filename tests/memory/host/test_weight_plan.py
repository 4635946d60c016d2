"""Which memory serves: decided before loading, with the reason; caches and conversions plug in."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from omnistage.contracts.errors import CheckpointError, UnsupportedCombinationError
from omnistage.memory.host.direct import DirectWeights
from omnistage.memory.host.layout import BlockLayout, fill, host_views
from omnistage.memory.host.mapping import AnonymousMemory
from omnistage.memory.host.weight_plan import plan_host_weights
from omnistage.memory.host.weights import MemoryWeights
from omnistage.memory.offload.host import HostBacking, HostPiece
from omnistage.memory.pipeline_loader import load_pipeline, plan_pipeline
from omnistage.memory.plan import SourceKind
from tests.checkpoints import checkpoint
from tests.memory.comparing import pipeline_differences
from tests.memory.host.placing import blocks_of, streaming
from tests.memory.host.test_mapping import maps_of

CHECKPOINT, PRIVATE, CACHE = (
    HostBacking.CHECKPOINT,
    HostBacking.PRIVATE,
    HostBacking.RUNTIME_CACHE,
)


class Cache:
    """Keeps weights by the layouts that they were published with, in the process."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.entries: dict[str, object] = {}
        self.published = []

    def lookup(self, plan, layouts, transform):
        weights = self.entries.get(plan.component)
        if weights is None:
            return None
        found = {
            path: BlockLayout(path=path, places=block.places, nbytes=block.nbytes)
            for path, block in weights.blocks.items()
        }
        assert found == dict(layouts)
        return weights

    def publish(self, plan, weights, transform):
        self.published.append(plan.component)
        if self.fails:
            return weights
        self.entries[plan.component] = copy_of(weights)
        weights.close()
        return self.entries[plan.component]


def copy_of(weights):
    blocks, memories = {}, []
    for path, block in weights.blocks.items():
        memories.append(AnonymousMemory(block.nbytes))
        fill(memories[-1].bytes, block.pieces)
        piece = HostPiece(source=memories[-1].bytes, offset_bytes=0)
        blocks[path] = dataclasses.replace(block, pieces=(piece,))
    return MemoryWeights(CACHE, blocks, memories)


class Halving:
    """Stands for a quantization: linear weights become half precision with a scale beside them."""

    key = "halving-1"

    def __init__(self) -> None:
        self.seen = []

    def __call__(self, module, path):
        here = module.get_submodule(path)
        meta = False
        for owner in here.modules():
            if isinstance(owner, torch.nn.Linear) and owner.weight.dtype == torch.float32:
                weight = owner.weight.detach()
                meta |= weight.is_meta
                scale = weight.abs().amax(1, keepdim=True)
                owner.weight = torch.nn.Parameter((weight / scale).half(), requires_grad=False)
                owner.register_buffer("weight_scale", scale)
        self.seen.append((path, meta))


def transformers_in(family="flux", dtype="float32"):
    plan = plan_pipeline(checkpoint(family), dtype=dtype)
    return plan, blocks_of(plan, family)


@pytest.mark.invariant("HOST-INV-007")
def test_the_backing_and_its_reason():
    plan, blocks = transformers_in()
    cases = [
        (plan, CHECKPOINT, None, CHECKPOINT, "its files hold the wanted bytes"),
        (plan, CACHE, None, CHECKPOINT, "its files hold the wanted bytes"),
        (plan, PRIVATE, None, PRIVATE, "as placed"),
        (plan, CACHE, Cache(), PRIVATE, "as placed; not in the cache yet"),
        (plan, CHECKPOINT, Cache(), CHECKPOINT, "its files hold the wanted bytes"),
    ]
    cast = plan_pipeline(checkpoint("flux"), dtype="bfloat16")
    words = "is stored as float32 and wanted as bfloat16"
    cases += [
        (cast, CHECKPOINT, None, PRIVATE, words),
        (cast, CHECKPOINT, Cache(), PRIVATE, f"{words}; not in the cache yet"),
    ]
    for one, wanted, cache, backing, reason in cases:
        decided = plan_host_weights(one, streaming(blocks, wanted), cache)
        assert decided.components["transformer"].backing is backing
        assert decided.reasons[0].endswith(reason)
        assert (decided.components["transformer"].opened is None) == (backing is PRIVATE)
        decided.close()


@pytest.mark.invariant("HOST-INV-010")
def test_a_tied_tensor_of_a_block_is_refused_whatever_the_backing():
    plan, blocks = transformers_in()
    module = plan.modules["transformer"]
    name = "x_embedder.bias"
    tied = dataclasses.replace(
        module.sources[name],
        kind=SourceKind.TIED,
        tied_to="transformer_blocks.0.attn.to_q.bias",
    )
    module = dataclasses.replace(module, sources={**module.sources, name: tied})
    plan = dataclasses.replace(plan, modules={**plan.modules, "transformer": module})
    for backing in HostBacking:
        with pytest.raises(UnsupportedCombinationError, match=r"one tensor.*offload none"):
            plan_host_weights(plan, streaming(blocks, backing))


@pytest.mark.invariant("HOST-INV-008")
@pytest.mark.parametrize(
    ("family", "component"),
    [("flux", "transformer"), ("flux", "vae"), ("qwen_image", "vae")],
    ids=["in the component", "in a later one", "in an earlier one"],
)
def test_a_failure_while_loading_closes_what_was_opened(family, component, monkeypatch):
    plan, blocks = transformers_in(family)
    module = plan.modules[component]
    name = next(name for name in module.sources if not name.startswith(blocks["transformer"]))
    wrong = dataclasses.replace(module.sources[name], shape=(1, 2, 3))
    module = dataclasses.replace(module, sources={**module.sources, name: wrong})
    plan = dataclasses.replace(plan, modules={**plan.modules, component: module})
    opened, really_open = [], DirectWeights.open

    def watched(*arguments):
        opened.append(really_open(*arguments))
        return opened[-1]

    monkeypatch.setattr(DirectWeights, "open", watched)
    with pytest.raises(CheckpointError, match="changed while"):
        load_pipeline(plan, placement=streaming(blocks))
    assert len(opened) == len(blocks)
    assert all(memory.is_closed for weights in opened for memory in weights.memories)


@pytest.mark.invariant("HOST-INV-008")
def test_a_failure_before_loading_closes_what_was_opened():
    """The second of two components that stream cannot."""
    plan, _ = transformers_in("qwen_image")
    blocks = blocks_of(plan, "qwen_image")
    module = plan.modules["text_encoder"]
    tied = dataclasses.replace(
        next(iter(module.sources.values())),
        kind=SourceKind.TIED,
        tied_to=f"{blocks['text_encoder'][0]}.mlp.up_proj.weight",
    )
    module = dataclasses.replace(module, sources={**module.sources, "other": tied})
    plan = dataclasses.replace(plan, modules={**plan.modules, "text_encoder": module})
    file = plan.modules["transformer"].files[0]
    before = maps_of(file).count("r--s")
    with pytest.raises(UnsupportedCombinationError):
        plan_host_weights(plan, streaming(blocks))
    assert maps_of(file).count("r--s") == before


@pytest.mark.invariant("HOST-INV-001")
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_packed_is_published_and_found_again(fails):
    cache = Cache(fails)
    plan, blocks = transformers_in(dtype="bfloat16")
    expected = load_pipeline(plan).pipeline
    first = load_pipeline(plan, placement=streaming(blocks), cache=cache)
    assert cache.published == ["transformer"]
    assert first.host_weights["transformer"].backing is (PRIVATE if fails else CACHE)
    second = load_pipeline(plan, placement=streaming(blocks), cache=cache)
    assert len(cache.published) == (2 if fails else 1)
    assert ("not in the cache yet" in second.reasons[0]) == fails
    for loaded in (first, second):
        assert pipeline_differences(loaded.pipeline, expected) == []
        views = host_views(loaded.host_weights["transformer"].blocks["transformer_blocks.0"])
        parameters = dict(loaded.pipeline.transformer.named_parameters())
        for name, view in views.items():
            assert parameters[name].data_ptr() == view.data_ptr()


@pytest.mark.invariant("HOST-INV-011")
def test_a_conversion_sees_block_after_block_and_equals_that_of_the_whole():
    plan, blocks = transformers_in()
    whole, each, cache = Halving(), Halving(), Cache()
    expected = load_pipeline(plan).pipeline
    whole(expected.transformer, "")
    resident = load_pipeline(plan, transforms={"transformer": each})
    assert pipeline_differences(resident.pipeline, expected) == []
    assert [path for path, _ in each.seen] == [*blocks["transformer"], ""]
    some = {"transformer": blocks["transformer"][:2]}
    for expectation in (PRIVATE, CACHE):
        streamed = Halving()
        loaded = load_pipeline(
            plan, placement=streaming(some), cache=cache, transforms={"transformer": streamed}
        )
        assert pipeline_differences(loaded.pipeline, expected) == []
        assert "converted while loading" in loaded.reasons[0]
        converted = [path for path, meta in streamed.seen if not meta]
        ready = [] if expectation is PRIVATE else list(some["transformer"])
        assert converted == [path for path in (*blocks["transformer"], "") if path not in ready]
        assert {path for path, meta in streamed.seen if meta} == set(some["transformer"])
    block = cache.entries["transformer"].blocks[some["transformer"][0]]
    names = {place.name for place in block.places}
    assert any(name.endswith("weight_scale") for name in names)


@pytest.mark.parametrize("backing", [CHECKPOINT, PRIVATE])
def test_progress_counts_every_byte_once(backing):
    plan, blocks = transformers_in()
    fractions = []
    loaded = load_pipeline(
        plan, lambda note, fraction: fractions.append(fraction), streaming(blocks, backing)
    )
    known = [fraction for fraction in fractions if fraction is not None]
    assert known == sorted(known)
    assert known[-2:] == [1.0, 1.0]
    loaded.close()
