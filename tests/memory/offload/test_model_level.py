"""Components take turns on the device: who is there when, and that numbers stay what they were."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.diffusion.compilation import CompiledBlocks
from omnistage.memory.offload.entries import entry_points
from omnistage.memory.offload.factory import make_backend
from omnistage.memory.offload.model_level import DelegatesOffload, ModelLevelOffload
from omnistage.memory.placement import ComponentPlacement, Placement, Residency
from tests.memory.offload.models import Pipeline, built, run
from tests.memory.offload.test_adapters import add_adapter


def text_encoder(seed: int = 3) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=1,
    )
    return CLIPTextModelWithProjection(config).eval().requires_grad_(False)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(16, 16)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(latents)


def pipeline(**changes: nn.Module) -> Pipeline:
    torch.manual_seed(5)
    parts = {
        "text_encoder": text_encoder(3),
        "text_encoder_2": text_encoder(4),
        "transformer": built("qwen", 0),
        "transformer_2": built("qwen", 1),
        "vae": Vae().eval().requires_grad_(False),
    }
    return Pipeline(**{**parts, **changes})


SWAPPED = ("text_encoder", "text_encoder_2", "transformer", "transformer_2")


def placement(names=SWAPPED, **settings) -> Placement:
    return Placement(
        strategy="model",
        components={
            name: ComponentPlacement(component=name, residency=Residency.SWAPPED, weight_bytes=1)
            for name in names
        },
        **settings,
    )


@contextmanager
def offloaded(platform, parts, placed=None):
    backend = make_backend(placed or placement(), {}, platform, "cpu")
    assert isinstance(backend, ModelLevelOffload)
    backend.enable(parts)
    try:
        yield backend
    finally:
        backend.disable()


def generate(parts) -> torch.Tensor:
    """Encode, denoise in two phases, decode."""
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        embeds = parts.text_encoder(tokens).text_embeds + parts.text_encoder_2(tokens).text_embeds
        latents = run(parts.transformer, "qwen") + run(parts.transformer_2, "qwen")
        return parts.vae.decode(latents) + embeds.mean()


@pytest.mark.invariant("MODEL-OFFLOAD-INV-001")
@pytest.mark.parametrize("limit_bytes", [None, 0])
def test_numbers_are_what_they_were(platform, limit_bytes):
    parts = pipeline()
    expected = generate(parts)
    assert expected.abs().max() > 0.1
    placed = placement(page_lock_limit_bytes=limit_bytes)
    with offloaded(platform, parts, placed) as backend, platform.watching_reads():
        for _ in range(2):
            assert torch.equal(generate(parts), expected)
        described = backend.describe()
    assert described["page_locked"] == (limit_bytes is None)
    assert described["arrivals"] == 8
    assert described["arrived_bytes"] == platform.uploaded_bytes > 0
    assert platform.overtaken == 0
    assert platform.locked_bytes == 0


@pytest.mark.invariant("MODEL-OFFLOAD-INV-004")
@pytest.mark.parametrize("inside", [True, False])
def test_whoever_enables_and_disables_may_be_in_inference_mode(platform, inside):
    parts = pipeline()
    expected = generate(parts)
    backend = make_backend(placement(), {}, platform, "cpu")
    with torch.inference_mode(inside):
        backend.enable(parts)
    assert torch.equal(generate(parts), expected)
    with torch.inference_mode(inside):
        backend.disable()
    tensors = [one for part in parts.components.values() for one in part.parameters()]
    assert not any(one.is_inference() for one in tensors)
    assert torch.equal(generate(parts), expected)


@pytest.mark.invariant("MODEL-OFFLOAD-INV-001")
def test_a_forgotten_wait_is_seen(platform):
    parts = pipeline()
    platform.ignored_waits.add("compute")
    with offloaded(platform, parts):
        assert generate(parts).isnan().any()


@pytest.mark.invariant("MODEL-OFFLOAD-INV-002")
def test_who_excludes_whom(platform):
    parts = pipeline()
    tokens = torch.arange(5)[None]
    with offloaded(platform, parts) as backend, torch.no_grad():
        assert backend.on_device() == ()
        parts.text_encoder(tokens)
        parts.text_encoder_2(tokens)
        assert backend.on_device() == ("text_encoder", "text_encoder_2")
        run(parts.transformer, "qwen")
        assert backend.on_device() == ("transformer",)
        run(parts.transformer_2, "qwen")
        assert backend.on_device() == ("transformer_2",)
        emptied = platform.caches_emptied
        run(parts.transformer_2, "qwen")
        parts.vae.decode(torch.zeros(1, 16))
        assert backend.on_device() == ("transformer_2",)
        assert platform.caches_emptied == emptied
        parts.text_encoder_2(tokens)
        assert backend.on_device() == ("text_encoder_2",)
    assert backend.on_device() == ()


@pytest.mark.invariant("MODEL-OFFLOAD-INV-002")
def test_the_devices_copy_is_dropped_and_the_hosts_kept(platform):
    parts = pipeline()
    with offloaded(platform, parts) as backend, torch.no_grad():
        parts.text_encoder(torch.arange(5)[None])
        held = weakref.ref(
            next(one for one in backend._turns.components if one.image is not None).image
        )
        on_host = [one.on_host[0].data_ptr() for one in backend._turns.components]
        run(parts.transformer, "qwen")
        gc.collect()
        assert held() is None
        assert on_host == [one.on_host[0].data_ptr() for one in backend._turns.components]
        encoder = backend._turns.components[0]
        assert all(
            tensor.data_ptr() == waiting.data_ptr()
            for tensor, waiting in zip(encoder.tensors, encoder.on_host, strict=True)
        )


@pytest.mark.invariant("MODEL-OFFLOAD-INV-003")
@pytest.mark.parametrize(
    "call",
    [
        lambda encoder, tokens: encoder(tokens).text_embeds,
        lambda encoder, tokens: encoder.text_model(tokens).last_hidden_state,
        lambda encoder, tokens: encoder.text_model.embeddings(tokens),
        lambda encoder, tokens: encoder.get_input_embeddings()(tokens),
        lambda encoder, tokens: (
            encoder.text_model.encoder(encoder.text_model.embeddings(tokens)).last_hidden_state
        ),
        lambda encoder, tokens: encoder.text_projection(torch.ones(1, 32)),
    ],
)
def test_whatever_way_a_component_is_called_it_is_there(platform, call):
    parts = pipeline()
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        expected = call(parts.text_encoder, tokens)
        with offloaded(platform, parts) as backend, platform.watching_reads():
            run(parts.transformer, "qwen")
            assert torch.equal(call(parts.text_encoder, tokens), expected)
            assert backend.on_device() == ("text_encoder",)


def test_nothing_inside_a_list_is_hooked():
    module = built("flux")
    hooked = {id(one) for one in entry_points(module)}
    assert id(module) in hooked
    assert not any(id(one) in hooked for one in module.transformer_blocks.modules())


@pytest.mark.invariant("MODEL-OFFLOAD-INV-004")
def test_disabling_restores_everything(platform):
    parts = pipeline()
    modules = [one for part in parts.components.values() for one in part.modules()]
    named = [pair for part in parts.components.values() for pair in part.named_parameters()]
    before = [(id(one), one.clone()) for _, one in named]
    hooks = [len(one._forward_pre_hooks) for one in modules]
    backend = make_backend(placement(), {}, platform, "cpu")
    for _ in range(2):
        backend.enable(parts)
        generate(parts)
        backend.disable()
        backend.disable()
        assert not backend.is_enabled
        assert platform.locked == {}
    after = [pair for part in parts.components.values() for pair in part.named_parameters()]
    for (_, parameter), (identity, value) in zip(after, before, strict=True):
        assert id(parameter) == identity
        assert torch.equal(parameter, value)
    assert hooks == [len(one._forward_pre_hooks) for one in modules]


def test_a_component_without_weights_triggers_nothing(platform):
    parts = pipeline(text_encoder_2=nn.Identity())
    with offloaded(platform, parts) as backend:
        parts.text_encoder_2(torch.ones(1))
        assert backend.on_device() == ()
        assert "text_encoder_2" not in backend.describe()["components"]
    assert platform.uploads == 0


@pytest.mark.invariant("MODEL-OFFLOAD-INV-005")
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_after_a_failed_arrival_the_next_call_is_right(platform, at):
    parts = pipeline()
    expected = generate(parts)
    with offloaded(platform, parts):
        platform.fail_upload[platform.uploads + at] = torch.OutOfMemoryError("injected")
        with pytest.raises(torch.OutOfMemoryError):
            generate(parts)
        assert torch.equal(generate(parts), expected)


@pytest.mark.parametrize("backend_name", ["eager", "aot_eager"])
def test_compiled_blocks_keep_their_kernels(platform, backend_name):
    parts = pipeline()
    compiled = CompiledBlocks(parts.transformer, backend=backend_name)
    compiled.install()
    expected = generate(parts)
    variants = compiled.compilations()
    with offloaded(platform, parts):
        for _ in range(2):
            assert torch.equal(generate(parts), expected)
        assert compiled.compilations() == variants
    compiled.close()


@pytest.mark.parametrize("while_there", [True, False])
def test_adapters_come_and_stay(platform, while_there):
    reference, parts = pipeline(), pipeline()
    plain = generate(parts)
    add_adapter(reference.transformer)
    expected = generate(reference)
    assert not torch.equal(plain, expected)
    with offloaded(platform, parts) as backend:
        if while_there:
            run(parts.transformer, "qwen")
        add_adapter(parts.transformer)
        assert torch.equal(generate(parts), expected)
        assert torch.equal(generate(parts), expected)
        if while_there:
            run(parts.transformer, "qwen")
        reference.transformer.fuse_lora()
        parts.transformer.fuse_lora()
        backend.refresh()
        assert torch.equal(generate(parts), generate(reference))
        assert torch.equal(generate(parts), generate(reference))


def test_what_cannot_be_served_is_refused_untouched(platform):
    def refused(parts, placed, error, message):
        backend = make_backend(placed, {}, platform, "cpu")
        with pytest.raises(error, match=message):
            backend.enable(parts)
        assert not backend.is_enabled
        assert not any(
            one._forward_pre_hooks for part in parts.components.values() for one in part.modules()
        )

    parts = pipeline()
    unsupported = UnsupportedCombinationError
    refused(parts, placement(["text_encoder", "text_encoder_2"]), unsupported, "takes its place")
    refused(parts, placement(["transformer"]), unsupported, "takes its place")
    refused(parts, placement(["nothing", "transformer"]), ConfigurationError, "no module at")
    shared = pipeline()
    shared.text_encoder_2.text_projection = shared.text_encoder.text_projection
    refused(shared, placement(), unsupported, "is a tensor of the block")
    with offloaded(platform, parts):
        other = make_backend(placement(), {}, platform, "cpu")
        with pytest.raises(ConfigurationError, match="is owned by offload 'model' already"):
            other.enable(parts)


class Split(Pipeline):
    """Moves the halves of its transformer itself."""

    def __init__(self, **components: nn.Module) -> None:
        super().__init__(**components)
        self.calls: list[str] = []

    def enable_omni_model_cpu_offload(self, *, device: str, pin_memory: bool) -> None:
        self.calls.append(f"on {device} {pin_memory}")

    def disable_omni_model_cpu_offload(self) -> None:
        self.calls.append("off")


@pytest.mark.invariant("MODEL-OFFLOAD-INV-006")
def test_a_pipeline_that_moves_its_own_parts_is_asked_to(platform):
    parts = Split(transformer=built("qwen"), vae=Vae())
    assert isinstance(parts, DelegatesOffload)
    assert not isinstance(pipeline(), DelegatesOffload)
    with offloaded(platform, parts, placement(["transformer"])) as backend:
        assert parts.calls == ["on cpu True"]
        run(parts.transformer, "qwen")
        assert platform.uploads == 0
        assert backend.describe()["delegated"]
    assert parts.calls == ["on cpu True", "off"]
