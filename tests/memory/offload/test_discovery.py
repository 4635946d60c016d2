"""Components by part, and blocks in the order in which they run, declared or told from names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.contracts.errors import ConfigurationError
from omnistage.memory.offload.discovery import (
    OffloadPlan,
    find_components,
    part_of,
    plan_of,
    streamable_blocks,
)
from tests.memory.offload.models import MODELS, Pipeline, built


def paths(**counts: int) -> list[str]:
    return [f"{name}.{index}" for name, count in counts.items() for index in range(count)]


@pytest.mark.invariant("OFFLOAD-INV-008")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen", paths(transformer_blocks=6)),
        ("flux", paths(transformer_blocks=2, single_transformer_blocks=3)),
        ("wan", paths(blocks=4)),
        ("sd3", paths(transformer_blocks=4)),
        ("unet", [*paths(down_blocks=2), "mid_block", *paths(up_blocks=2)]),
    ],
)
def test_blocks_of_denoisers(name, expected):
    from accelerate import init_empty_weights

    with init_empty_weights():
        skeleton = MODELS[name].build()
    assert any(one.is_meta for one in skeleton.parameters())
    assert streamable_blocks(skeleton) == expected == streamable_blocks(built(name))


@pytest.mark.invariant("OFFLOAD-INV-008")
@pytest.mark.parametrize("name", MODELS)
def test_blocks_run_in_the_order_found(name):
    module, called = built(name), []
    found = streamable_blocks(module)
    for path in found:
        module.get_submodule(path).register_forward_pre_hook(
            lambda *_, path=path: called.append(path)
        )
    with torch.no_grad():
        module(**MODELS[name].inputs(1))
    assert called == found


def test_blocks_of_encoders():
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
        )
    )
    t5 = T5EncoderModel(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2))
    assert [path.rpartition(".")[2] for path in streamable_blocks(clip)] == ["0", "1", "2"]
    assert all("layers" in path for path in streamable_blocks(clip))
    assert streamable_blocks(t5) == ["encoder.block.0", "encoder.block.1"]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.tail = nn.Linear(2, 2)
        self.context_encoder = nn.Module()
        self.context_encoder.layers = nn.ModuleList([nn.Linear(2, 2), nn.Identity()])


@pytest.mark.invariant("OFFLOAD-INV-008")
def test_declarations_win():
    plan = OffloadPlan(
        block_attrs={"transformer": ("tail", "blocks")},
        offload_submodules={"context_encoder": "layers"},
        resident_paths=("transformer.blocks.1",),
    )
    found = streamable_blocks(Nested(), "transformer", plan)
    assert found == ["context_encoder.layers.0", "tail", "blocks.0", "blocks.2"]
    assert streamable_blocks(Nested()) == [*paths(blocks=3), "context_encoder.layers.0"]
    module = Nested()
    module._layerwise_offload_blocks_attrs = ["tail"]
    assert streamable_blocks(module, "transformer") == ["tail"]


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Bilinear(2, 2, 2)


class Levels(nn.Module):
    """Blocks in wrappers, and lists of lists, as HiDream and Stable Cascade have them."""

    _no_split_modules = ("Bilinear",)

    def __init__(self) -> None:
        super().__init__()
        self.double_stream = nn.ModuleList(Wrapper() for _ in range(2))


class Cascade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(2, 2), nn.SiLU(), nn.Linear(2, 2)]) for _ in range(2)
        )
        self.up_blocks = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])


@pytest.mark.invariant("OFFLOAD-INV-008")
def test_every_block_is_something_that_is_called():
    assert streamable_blocks(Levels()) == paths(double_stream=2)
    assert streamable_blocks(Cascade()) == [
        *("down_blocks.0.0", "down_blocks.0.2", "down_blocks.1.0", "down_blocks.1.2"),
        "up_blocks.0.0",
    ]


def test_a_wrong_declaration_is_an_error():
    plan = OffloadPlan(block_attrs={"transformer": ("layers",)})
    with pytest.raises(ConfigurationError, match=r"no blocks at 'layers'.*its modules are: blocks"):
        streamable_blocks(Nested(), "transformer", plan)


class Declaring(Pipeline):
    _dit_modules = ("model.dit",)
    _encoder_modules = ("model.text",)
    _offload_plan = OffloadPlan(block_attrs={"model.dit": ("blocks",)})


def test_components_by_declaration():
    model = nn.ModuleDict({"dit": Nested(), "text": nn.Linear(1, 1)})
    pipeline = Declaring(model=model)
    found = find_components(pipeline)
    assert found.denoisers == {"model.dit": model["dit"]}
    assert found.encoders == {"model.text": model["text"]}
    assert plan_of(pipeline) is Declaring._offload_plan
    parts = [part_of(name, Declaring) for name in ("model", "model.text", "transformer")]
    assert parts == ["denoisers", "encoders", "resident"]
    assert part_of("transformer", Pipeline()) == "denoisers"
    assert plan_of(Pipeline()) is None
    with pytest.raises(ConfigurationError, match=r"no module at 'model.dit'.*are: other"):
        find_components(Declaring(other=nn.Linear(1, 1)))


def test_components_by_name():
    names = ("transformer", "transformer_2", "text_encoder", "vae", "image_encoder")
    found = find_components(Pipeline(**{name: nn.Linear(1, 1) for name in names}))
    assert list(found.denoisers) == ["transformer", "transformer_2"]
    assert list(found.encoders) == ["text_encoder", "image_encoder"]
    assert list(found.autoencoders) == ["vae"]
    assert list(found.all()) == ["transformer", "transformer_2", *names[2:3], *names[4:], "vae"]
    assert [part_of(name) for name in ("sr_dit", "unet", "prior", "connectors")] == [
        "denoisers",
        "denoisers",
        "denoisers",
        "encoders",
    ]
