"""Regional compilation on the CPU: how often, of what, and that it is undone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.fx.experimental import _config

from omnistage.attention.joint import install_joint_attention
from omnistage.contracts.errors import ConfigurationError
from omnistage.diffusion import compilation
from omnistage.diffusion.compilation import CompiledBlocks, repeated_blocks
from tests.diffusion import denoisers

# Three for each kind of block: one shape, any shape, any shape with a batch of one. The last block
# of SD3 is a kind of its own; the first single block of Flux gets whole tensors, the others slices.
MAX_VARIANTS = {
    "QwenImageTransformerBlock": 3,
    "FluxTransformerBlock": 3,
    "FluxSingleTransformerBlock": 6,
    "JointTransformerBlock": 6,
}


class Compiler:
    """Compiles nothing and counts. Raises `error` where there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.error = error

    def __call__(self, graph_module, example_inputs):
        if self.error:
            raise self.error
        self.calls += 1
        return graph_module.forward


def run(blocks: CompiledBlocks, module: nn.Module, inputs: dict) -> torch.Tensor:
    shapes = tuple(value.shape for value in inputs.values() if hasattr(value, "shape"))
    with blocks.for_shapes(shapes), torch.no_grad():
        return module(**inputs, return_dict=False)[0]


def random_shapes(count: int) -> list[dict[str, int]]:
    rng = random.Random(3)
    return [
        {
            "batch": rng.choice([1, 2, 3, 4, 6, 8]),
            "side": rng.choice([2, 3, 4, 5, 6, 8]),
            "width": rng.choice([2, 3, 4, 5]),
            "text": rng.randint(2, 40),
        }
        for _ in range(count)
    ]


ONE_AT_A_TIME = [
    {"batch": batch, "side": side, "width": 4, "text": text}
    for batch, side, text in [(2, 4, 10), (2, 5, 10), (2, 5, 12), (3, 5, 12), (1, 5, 12), (1, 6, 9)]
]


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
@pytest.mark.parametrize(
    "name",
    [
        denoisers.QWEN,
        pytest.param(denoisers.FLUX, marks=pytest.mark.slow),
        pytest.param(denoisers.SD3, marks=pytest.mark.slow),
    ],
)
def test_many_shapes_take_few_variants(name: str) -> None:
    module, plain, compiler = denoisers.make(name), denoisers.make(name), Compiler()
    blocks = CompiledBlocks(module, backend=compiler, static_shapes=1)
    blocks.install()
    for shape in ONE_AT_A_TIME + random_shapes(30):
        inputs = denoisers.call(name, **shape)
        found = run(blocks, module, inputs)
        with torch.no_grad():
            assert torch.allclose(found, plain(**inputs, return_dict=False)[0], atol=1e-5)
    counts = blocks.compilations()
    assert sum(counts.values()) == compiler.calls
    assert all(0 < count <= MAX_VARIANTS[cls] for cls, count in counts.items()), counts
    assert "recompile limit" not in str(torch._dynamo.utils.counters)
    blocks.close()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Stack(nn.Module):
    """Blocks without a declaration of them, as a shorter list and a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedders = nn.ModuleList([nn.Linear(4, 4)])
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        for layer in (*self.embedders, *self.layers):
            x = layer(x)
        return (x,)


class Nested(Stack):
    _repeated_blocks = ("Stack", "Layer")

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()


def test_blocks_are_the_declared_ones_else_the_longest_list() -> None:
    stack, nested = Stack(), Nested()
    assert repeated_blocks(stack) == list(stack.layers)
    assert repeated_blocks(nested) == [*nested.layers, nested.stack]
    assert repeated_blocks(nn.Linear(2, 2)) == []
    qwen = denoisers.make(denoisers.QWEN)
    assert repeated_blocks(qwen) == list(qwen.transformer_blocks)
    flux = denoisers.make(denoisers.FLUX)
    expected = [*flux.transformer_blocks, *flux.single_transformer_blocks]
    assert repeated_blocks(flux) == expected


def test_all_blocks_of_a_class_share_one_variant() -> None:
    module, compiler = Stack(), Compiler()
    blocks = CompiledBlocks(module, backend=compiler, static_shapes=1)
    blocks.install()
    for _ in range(2):
        run(blocks, module, {"x": torch.ones(2, 4)})
    assert blocks.compilations() == {"Layer": 1}
    assert blocks.seconds() > 0
    run(blocks, module, {"x": torch.ones(3, 4)})
    run(blocks, module, {"x": torch.ones(5, 4)})
    assert blocks.compilations() == {"Layer": 2}
    run(blocks, module, {"x": torch.ones(2, 4)})
    assert compiler.calls == 2
    with pytest.raises(KeyError), blocks.for_shapes((torch.Size([2, 4]),)):
        raise KeyError
    with torch.no_grad():
        module(torch.ones(9, 4))
    assert compiler.calls == 2
    blocks.close()


def test_without_static_shapes_the_first_variant_takes_any_shape() -> None:
    module = Stack()
    blocks = CompiledBlocks(module, backend=Compiler())
    blocks.install()
    for batch in (2, 3, 7):
        run(blocks, module, {"x": torch.ones(batch, 4)})
    assert blocks.compilations() == {"Layer": 1}
    blocks.close()


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
def test_hooks_stay_outside_what_is_compiled() -> None:
    module, seen = Stack(), []
    blocks = CompiledBlocks(module, backend=Compiler())
    blocks.install()

    def hook(layer: nn.Module, args: tuple[torch.Tensor]) -> None:
        seen.append((torch.compiler.is_compiling(), float(args[0].sum())))

    handle = module.layers[1].register_forward_pre_hook(hook)
    for value in (1.0, 2.0):
        run(blocks, module, {"x": torch.full((2, 4), value)})
    handle.remove()
    assert [compiling for compiling, _ in seen] == [False, False]
    assert blocks.compilations() == {"Layer": 1}
    blocks.close()


def test_a_wrapped_block_is_refused_and_nothing_is_touched() -> None:
    module = Stack()
    wrapped = module.layers[2].forward
    module.layers[2].forward = wrapped
    with pytest.raises(ConfigurationError, match=r"Layer.*wrapped already.*--enforce-eager"):
        CompiledBlocks(module, backend=Compiler()).install()
    assert "forward" not in vars(module.layers[0])
    assert vars(module.layers[2])["forward"] is wrapped


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
def test_close_leaves_the_blocks_as_they_were() -> None:
    module = Stack()
    parts = [module, *module.layers]
    before = [dict(vars(part)) for part in parts]
    blocks = CompiledBlocks(module, backend=Compiler())
    blocks.install()
    run(blocks, module, {"x": torch.ones(2, 4)})
    blocks.close()
    blocks.close()
    assert [dict(vars(part)) for part in parts] == before
    assert blocks.compilations() == {}


def test_options_reach_the_compiler() -> None:
    given = []

    def compiler(graph_module, example_inputs, config_patches=None):
        given.append(config_patches)
        return graph_module.forward

    for tuned in (False, True):
        module = Stack()
        blocks = CompiledBlocks(module, backend=compiler, coordinate_descent=tuned)
        blocks.install()
        run(blocks, module, {"x": torch.ones(2, 4)})
        blocks.close()
    assert given == [None, {"coordinate_descent_tuning": True}]
    assert "coordinate_descent_tuning" in torch._inductor.list_options()


def test_two_stages_of_one_class_do_not_use_up_each_others_variants(caplog) -> None:
    for _ in range(6):
        module, compiler = Stack(), Compiler()
        blocks = CompiledBlocks(module, backend=compiler)
        blocks.install()
        for batch in (2, 3, 1):
            run(blocks, module, {"x": torch.ones(batch, 4)})
        assert compiler.calls == 2
    assert "limit" not in caplog.text


def test_an_older_torch_counts_for_all_uses_of_a_class(monkeypatch, caplog) -> None:
    monkeypatch.setattr(compilation, "_limits_are_ours", lambda: False)

    class Own(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    module = Stack()
    module.layers = nn.ModuleList([Own(), Own()])
    blocks = CompiledBlocks(module, backend=Compiler(), static_shapes=1)
    blocks.install()
    for batch in (2, 3, 7, 1, 5):
        run(blocks, module, {"x": torch.ones(batch, 4)})
    assert blocks.compilations() == {"Own": 3}
    assert "limit" not in caplog.text
    blocks.close()


def test_the_limit_of_variants_is_told(caplog) -> None:
    class Choosy(Layer):
        def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
            return super().forward(x) if kind == 0 else x * str(kind).count("1")

    module = nn.Sequential()
    module.layers = nn.ModuleList([Choosy()])
    blocks = CompiledBlocks(module, backend=Compiler())
    blocks.install()
    with blocks.for_shapes(()), torch.no_grad():
        for kind in range(20):
            module.layers[0](torch.ones(2, 4), kind)
    assert "Choosy was compiled" in caplog.text
    assert "run uncompiled" in caplog.text
    blocks.close()


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
def test_sizes_that_are_equal_by_chance_make_no_variants() -> None:
    """A batch of two beside (tokens, channels, 2), as many text as image tokens."""
    module = denoisers.make(denoisers.QWEN)
    restore = install_joint_attention(module)
    blocks = CompiledBlocks(module, backend=Compiler())
    blocks.install()
    for batch, side, text in [(2, 4, 16), (2, 5, 10), (4, 5, 12), (6, 6, 8), (1, 4, 16), (1, 5, 9)]:
        lengths = torch.full((batch,), text)
        lengths[0] = 2
        inputs = denoisers.call(denoisers.QWEN, batch, side, text, width=4)
        run(blocks, module, inputs | {"attention_kwargs": {"text_lengths": lengths}})
    assert blocks.compilations() == {"QwenImageTransformerBlock": 2}
    blocks.close()
    restore()


def test_settings_of_the_compiler_change_only_inside() -> None:
    seen = []

    def compiler(graph_module, example_inputs):
        seen.append(_config.use_duck_shape)
        raise NotImplementedError

    module = Stack()
    blocks = CompiledBlocks(module, backend=compiler)
    blocks.install()
    before = _config.use_duck_shape
    with pytest.raises(ConfigurationError), torch.no_grad():
        module(torch.ones(2, 4))
    assert seen == [False]
    assert _config.use_duck_shape == before
    blocks.close()


def test_a_wrapper_of_the_module_stays() -> None:
    """Model-level offloading replaces the `forward` of the whole module."""
    module, calls = Stack(), []
    inner = module.forward

    def offloaded(x: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        calls.append(1)
        return inner(x, return_dict)

    module.forward = offloaded
    blocks = CompiledBlocks(module, backend=Compiler())
    blocks.install()
    run(blocks, module, {"x": torch.ones(2, 4)})
    assert calls == [1]
    assert blocks.compilations() == {"Layer": 1}
    blocks.close()
    assert module.forward is offloaded
