"""A pipeline's denoising module as the step loop calls it: compiled, fused, replayed where on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import ConfigurationError
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    import torch
    from torch import nn

    from omnistage.diffusion.compilation import CompiledBlocks
    from omnistage.diffusion.fused_layers import FusedLayers
    from omnistage.diffusion.graphs import GraphCache
    from omnistage.platforms.base import Platform

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class DenoiserSettings:
    """What may be done to a denoiser for speed.

    `compile` works by blocks. `graphs` replays captured graphs for calls of up to
    `graph_max_tokens` (batch x sequence, text included: at more, launching kernels is not what
    takes the time), from the `captured_at_use`-th call of equal shapes and text lengths on, at most
    `max_graphs` of them held. `coordinate_descent` lets the compiler tune its kernels longer.
    `static_shapes`: how many shapes, the first to come, get kernels of exactly that shape, which
    help only where shapes repeat to the length of the prompt. `fuse` replaces layers by fused ones.
    `weights_move`: weights may be on the host now. `backend` compiles: a name or callable that
    `torch.compile` takes; only with one that is not the default are devices other than CUDA
    compiled for.
    """

    compile: bool = True
    graphs: bool = True
    graph_max_tokens: int = 4096
    max_graphs: int = 16
    captured_at_use: int = 12
    coordinate_descent: bool = False
    static_shapes: int = 0
    fuse: bool = True
    weights_move: bool = False
    backend: str | Callable[..., Any] | None = None


class Denoiser:
    """A pipeline's denoising module as the step loop calls it: compiled by blocks and replayed
    from captured graphs where that is on.

    `eager` (a stage's `enforce_eager`) leaves the module as it is, and so does a device of a kind
    without captured graphs (all but CUDA), unless `settings.backend` names a compiler for it.

    `on_compile` is called before anything is compiled, for who watches how long a step takes.
    """

    def __init__(
        self,
        module: nn.Module,
        platform: Platform,
        device: str,
        *,
        eager: bool,
        settings: DenoiserSettings,
    ) -> None:
        self.module = module
        self._platform = platform
        self._device = device
        self._settings = settings
        slow_kind = platform.graphs_unavailable_reason() is not None
        self._eager = eager or (slow_kind and settings.backend is None)
        self._fused: FusedLayers | None = None
        self._blocks: CompiledBlocks | None = None
        self._graphs: GraphCache | None = None
        self.on_compile: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Fuse, compile and prepare for graphs, as set. Nothing is compiled before the first call.

        Raises `ConfigurationError` when the module cannot be compiled as it stands; then it is
        left as it was.
        """
        if self._eager:
            return
        try:
            self._install()
        except BaseException:
            self.close()
            raise

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Equals `module(**inputs, return_dict=False)[0]`, without gradients.

        Raises what the module does, and `ConfigurationError` when it cannot be compiled.
        """
        import torch

        with torch.no_grad():
            if self._graphs is not None and self._may_replay(inputs):
                return self._graphs(inputs)
            return self._forward(**inputs)

    def describe(self) -> dict[str, Any]:
        """For logs: "eager", "fused_layers", "compilations" by class of block, "compile_s" and
        "graphs" (see `GraphCache.describe`; None where they are not in use)."""
        blocks = self._blocks
        return {
            "eager": self._eager,
            "fused_layers": len(self._fused) if self._fused else 0,
            "compilations": blocks.compilations() if blocks else {},
            "compile_s": blocks.seconds() if blocks else 0.0,
            "graphs": self._graphs.describe() if self._graphs else None,
        }

    def compilations(self) -> int:
        """How many block variants were compiled so far."""
        return sum(self._blocks.compilations().values()) if self._blocks else 0

    def close(self) -> None:
        """Undo exactly what `install` did, last first, and free the graphs."""
        if self._graphs is not None:
            self._graphs.clear()
            self._graphs = None
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
        if self._fused is not None:
            self._fused.close()
            self._fused = None

    def _install(self) -> None:
        from omnistage.diffusion.compilation import CompiledBlocks
        from omnistage.diffusion.fused_layers import FusedLayers
        from omnistage.diffusion.graphs import GraphCache

        settings = self._settings
        if settings.fuse:
            self._fused = FusedLayers(device=self._device, weights_move=settings.weights_move)
            self._fused.install(self.module)
        if settings.compile:
            if (
                settings.backend is None
                and self._platform.capabilities(self._device).triton is None
            ):
                raise ConfigurationError(
                    f"compiling for {self._device} needs the package triton; install it or start "
                    "with --enforce-eager"
                )
            self._blocks = CompiledBlocks(
                self.module,
                coordinate_descent=settings.coordinate_descent,
                static_shapes=settings.static_shapes,
                backend=settings.backend or "inductor",
                on_compile=lambda: self.on_compile(),
            )
            self._blocks.install()
        if settings.graphs:
            self._graphs = GraphCache(
                self._forward,
                self._platform,
                self._device,
                settings.max_graphs,
                captured_at_use=settings.captured_at_use,
            )

    def _forward(self, **inputs: Any) -> torch.Tensor:
        with self._blocks.for_shapes(_shapes(inputs)) if self._blocks else nullcontext():
            output: torch.Tensor = self.module(**inputs, return_dict=False)[0]
        return output

    def _may_replay(self, inputs: Mapping[str, Any]) -> bool:
        """Hooks on the module expect to be called; a graph would leave them out."""
        module = self.module
        hooked = module._forward_pre_hooks or module._forward_hooks
        return not hooked and tokens_of(module, inputs) <= self._settings.graph_max_tokens


def tokens_of(module: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Batch x sequence of a call, image and text: of `hidden_states` (batch, tokens, channels) or
    (batch, channels, …, height, width), and of `encoder_hidden_states` (batch, tokens, width)."""
    x = inputs["hidden_states"]
    if x.ndim == 3:
        tokens = x.shape[0] * x.shape[1]
    else:
        patch = getattr(module.config, "patch_size", 1)
        patch_area = patch * patch if isinstance(patch, int) else patch[-1] * patch[-2]
        tokens = x.shape[0] * x[0, 0].numel() // patch_area
    text = inputs.get("encoder_hidden_states")
    return tokens + (text.shape[0] * text.shape[1] if text is not None and text.ndim == 3 else 0)


def _shapes(value: Any) -> Hashable:
    """Shapes of the tensors in arguments, nested as they are."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((name, _shapes(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_shapes(item) for item in value)
    return None
