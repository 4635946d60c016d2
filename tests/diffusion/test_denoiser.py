"""A denoiser computes what its module does, whatever is on, and leaves the module as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omnistage.attention.joint import install_joint_attention
from omnistage.contracts.errors import ConfigurationError
from omnistage.diffusion.denoiser import Denoiser, DenoiserSettings, tokens_of
from omnistage.diffusion.fused_layers import FusedGELU
from omnistage.platforms.cpu import CpuPlatform
from omnistage.platforms.registry import platform_of
from tests.diffusion import denoisers
from tests.diffusion.graph_platform import GraphPlatform
from tests.diffusion.test_compilation import Compiler


def plain(module: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs, return_dict=False)[0]


def denoiser(module: torch.nn.Module, *, eager: bool = False, **settings: Any) -> Denoiser:
    found = Denoiser(
        module,
        CpuPlatform(),
        "cpu",
        eager=eager,
        settings=DenoiserSettings(**{"captured_at_use": 3} | settings),
    )
    found.install()
    return found


def state(module: torch.nn.Module) -> list[tuple[type, set[str]]]:
    return [(type(part), set(vars(part))) for part in module.modules()]


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
@pytest.mark.parametrize("name", denoisers.ALL)
@pytest.mark.parametrize("settings", [{"eager": True, "backend": Compiler()}, {}])
def test_eager_is_the_module_to_the_bit(name: str, settings: dict[str, Any]) -> None:
    module, inputs = denoisers.make(name), denoisers.call(name)
    before, untouched = plain(module, inputs), state(module)
    found = denoiser(module, **settings)
    assert state(module) == untouched
    result = found(**inputs)
    assert torch.equal(result, before)
    assert not result.requires_grad
    assert before.abs().max() > 0.1
    assert found.describe() == {
        "eager": True, "fused_layers": 0, "compilations": {}, "compile_s": 0.0, "graphs": None,
    }  # fmt: skip
    assert found.compilations() == 0
    found.close()


def test_each_compilation_is_told_before_it_begins() -> None:
    found, done = denoiser(denoisers.make(denoisers.QWEN), backend="eager"), []
    found.on_compile = lambda: done.append(found.compilations())
    for _ in range(2):
        found(**denoisers.call(denoisers.QWEN))
    assert done == list(range(found.compilations()))
    assert done


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
@pytest.mark.parametrize("name", denoisers.ALL)
def test_compiled_equals_the_module_and_close_restores_it(name: str) -> None:
    module, untouched = denoisers.make(name), state(denoisers.make(name))
    calls = [denoisers.call(name), denoisers.call(name, batch=3, side=5, text=9)]
    before = [plain(module, inputs) for inputs in calls]
    found = denoiser(module, backend="eager")
    for inputs, expected in zip(calls, before, strict=True):
        assert torch.allclose(found(**inputs), expected, atol=1e-5, rtol=0)
    assert found.compilations() == sum(found.describe()["compilations"].values()) > 0
    assert found.describe()["compile_s"] > 0
    assert found.describe()["graphs"]["off"] == "CPU devices have no captured graphs"
    found.close()
    found.close()
    assert state(module) == untouched
    assert [torch.equal(plain(module, i), e) for i, e in zip(calls, before, strict=True)] == [
        True
    ] * 2


@pytest.mark.slow
@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
def test_generated_code_equals_the_module_for_texts_of_any_length() -> None:
    """With the joint attention: each sample of a batch equals itself alone, uncompiled."""
    module, reference = denoisers.make(denoisers.QWEN), denoisers.make(denoisers.QWEN)
    restore = install_joint_attention(module)
    found = denoiser(module, backend="inductor")
    for batch, side, lengths in [(2, 4, [7, 2]), (3, 5, [9, 1, 4]), (4, 4, [3, 3, 8, 5])]:
        inputs = denoisers.call(denoisers.QWEN, batch, side, max(lengths))
        kwargs = {"text_lengths": torch.tensor(lengths)}
        result = found(**inputs, attention_kwargs=kwargs)
        for row, length in enumerate(lengths):
            alone = {key: value[row : row + 1] for key, value in inputs.items()}
            alone["encoder_hidden_states"] = alone["encoder_hidden_states"][:, :length]
            expected = plain(reference, alone)
            assert torch.allclose(result[row : row + 1], expected, atol=1e-5, rtol=1e-5)
    assert found.compilations() == 1
    found.close()
    restore()


def test_a_wrong_compiler_is_noticed() -> None:
    """The comparisons above can fail."""

    def wrong(graph_module, example_inputs):
        def run(*args):
            return [value * 1.001 for value in graph_module.forward(*args)]

        return run

    module, inputs = denoisers.make(denoisers.QWEN), denoisers.call(denoisers.QWEN)
    before = plain(module, inputs)
    found = denoiser(module, backend=wrong)
    assert not torch.allclose(found(**inputs), before, atol=1e-5, rtol=0)
    found.close()


def test_a_compile_error_says_how_to_go_on() -> None:
    compiler = Compiler(NotImplementedError("no such operator"))
    module, inputs = denoisers.make(denoisers.QWEN), denoisers.call(denoisers.QWEN)
    found = denoiser(module, backend=compiler)
    with pytest.raises(
        ConfigurationError, match=r"QwenImageTransformer2DModel cannot be compiled.*--enforce-eager"
    ) as caught:
        found(**inputs)
    assert "no such operator" in caught.value.detail
    found.close()
    assert plain(module, inputs).isfinite().all()


def test_out_of_memory_in_the_compiler_stays_out_of_memory() -> None:
    compiler = Compiler(torch.OutOfMemoryError("full"))
    found = denoiser(denoisers.make(denoisers.QWEN), backend=compiler)
    with pytest.raises(torch.OutOfMemoryError):
        found(**denoisers.call(denoisers.QWEN))
    found.close()


def test_a_failed_install_leaves_the_module_as_it_was() -> None:
    module = denoisers.make(denoisers.QWEN)
    block = module.transformer_blocks[1]
    block.forward = block.forward
    untouched = state(module)
    with pytest.raises(ConfigurationError, match="--enforce-eager"):
        denoiser(module, backend=Compiler())
    assert state(module) == untouched


def test_a_missing_compiler_is_told_at_start() -> None:
    module = denoisers.make(denoisers.QWEN)
    untouched = state(module)
    found = Denoiser(
        module, GraphPlatform(), "fake:0", eager=False, settings=DenoiserSettings(captured_at_use=3)
    )
    with pytest.raises(ConfigurationError, match=r"fake:0 needs .* triton.*--enforce-eager"):
        found.install()
    assert state(module) == untouched


def replaying(module: torch.nn.Module, **settings: Any) -> tuple[Denoiser, GraphPlatform]:
    """Graphs alone, on a platform that plays them. All tensors are host tensors here, which are
    told apart by value: only equal calls are replayed."""
    platform = GraphPlatform()
    settings = {"compile": False, "fuse": False, **settings}
    found = Denoiser(
        module,
        platform,
        "fake:0",
        eager=False,
        settings=DenoiserSettings(**{"captured_at_use": 3} | settings),
    )
    found.install()
    return found, platform


@pytest.mark.parametrize("name", denoisers.ALL)
def test_small_calls_are_replayed_and_give_the_bits(name: str) -> None:
    module, inputs = denoisers.make(name), denoisers.call(name)
    before = plain(module, inputs)
    found, platform = replaying(module)
    assert all(torch.equal(found(**inputs), before) for _ in range(5))
    assert found.describe()["graphs"]["replays"] == 3
    found.close()
    assert all(graph.is_reset for graph in platform.graphs)
    assert found.describe()["graphs"] is None


def test_larger_calls_are_not_captured() -> None:
    inputs = denoisers.call(denoisers.QWEN, batch=2, side=4, text=7)
    for most, captures in ((2 * (16 + 7), 1), (2 * (16 + 7) - 1, 0)):
        found, _ = replaying(denoisers.make(denoisers.QWEN), graph_max_tokens=most)
        for _ in range(4):
            found(**inputs)
        assert found.describe()["graphs"]["captures"] == captures
        found.close()


def test_hooks_on_the_module_are_called_every_time() -> None:
    module, inputs, seen = denoisers.make(denoisers.QWEN), denoisers.call(denoisers.QWEN), []
    found, _ = replaying(module)
    for _ in range(4):
        found(**inputs)
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(1))
    for _ in range(4):
        found(**inputs)
    handle.remove()
    assert len(seen) == 4
    assert found.describe()["graphs"]["replays"] == 2
    found(**inputs)
    assert found.describe()["graphs"]["replays"] == 3
    found.close()


@pytest.mark.parametrize(
    ("name", "tokens"), [(denoisers.QWEN, 46), (denoisers.FLUX, 46), (denoisers.SD3, 46)]
)
def test_tokens_are_those_of_image_and_text_in_the_batch(name: str, tokens: int) -> None:
    assert tokens_of(denoisers.make(name), denoisers.call(name, 2, 4, 7)) == tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheDevice:
    def build(self, name: str, **settings: Any) -> tuple[torch.nn.Module, Denoiser]:
        module = denoisers.make(name).to("cuda", torch.bfloat16)
        found = Denoiser(
            module, platform_of("cuda:0"), "cuda:0", eager=False,
            settings=DenoiserSettings(**{"captured_at_use": 3} | settings),
        )  # fmt: skip
        return module, found

    def calls(self, name: str, **shape: int) -> dict[str, Any]:
        return {
            key: value.to("cuda", torch.bfloat16) if isinstance(value, torch.Tensor) else value
            for key, value in denoisers.call(name, **shape).items()
        }

    @pytest.mark.parametrize("name", denoisers.ALL)
    def test_everything_on_equals_the_module_and_is_undone(self, name: str) -> None:
        module, found = self.build(name)
        shapes = [{"batch": 2, "text": 7}, {"batch": 2, "text": 9}, {"batch": 3, "text": 9}]
        calls = [self.calls(name, **shape, seed=seed) for shape in shapes for seed in range(4)]
        before = [plain(module, inputs) for inputs in calls]
        untouched = state(module)
        found.install()
        assert any(isinstance(part, FusedGELU) for part in module.modules())
        for inputs, expected in zip(calls, before, strict=True):
            result = found(**inputs)
            difference = (result.float() - expected.float()).abs().max()
            assert difference <= 0.03 * expected.float().abs().max()
        described = found.describe()
        assert described["graphs"]["captures"] == 3
        assert described["graphs"]["uncaptured"] == {}
        assert described["fused_layers"] > 0
        assert found.compilations() > 0
        found.close()
        assert state(module) == untouched
        for inputs, expected in zip(calls, before, strict=True):
            assert torch.equal(plain(module, inputs), expected)

    def test_a_replay_gives_the_bits_of_the_compiled_call(self) -> None:
        _, found = self.build(denoisers.QWEN)
        found.install()
        calls = [self.calls(denoisers.QWEN, seed=seed) for seed in range(4)]
        called = [found(**inputs) for inputs in calls[:2]]
        replayed = [found(**inputs) for inputs in [*calls[2:], *calls[:2]]][2:]
        assert found.describe()["graphs"]["replays"] == 4
        assert all(torch.equal(a, b) for a, b in zip(called, replayed, strict=True))
        found.close()
