"""Regional compilation: the repeated blocks of a denoiser, never the whole of it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from omnistage.contracts.errors import ConfigurationError
from omnistage.observability.logging import get_logger

logger = get_logger(__name__)

_RECOMPILE_LIMIT = 16


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules of the classes that `module._repeated_blocks` names (diffusers'
    convention), else the entries of its longest `ModuleList`; empty where it has neither."""
    names = getattr(module, "_repeated_blocks", None) or ()
    found: list[nn.Module] = []
    inside: set[int] = set()
    for part in module.modules():
        if type(part).__name__ in names and id(part) not in inside:
            found.append(part)
            inside.update(id(below) for below in part.modules())
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return found or list(max(lists, key=len, default=()))


class CompiledBlocks:
    """The repeated blocks of one module, compiled; `close` makes them what they were.

    All blocks of a class share one compiled function. Calls whose shapes are among the first
    `static_shapes` seen get kernels of exactly that shape, all others share kernels of any shape:
    torch's automatic choice finds one changing dimension at a time, and gives up silently at its
    limit of 8 variants, which four changes reach.

    Only a block's `forward` is compiled: hooks on the block stay outside.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        coordinate_descent: bool = False,
        static_shapes: int = 1,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self._blocks = repeated_blocks(module)
        self._options = {"coordinate_descent_tuning": True} if coordinate_descent else {}
        self._static_shapes = static_shapes
        self._backend = backend
        self._static_keys: set[Hashable] = set()
        self._classes: dict[type[nn.Module], _CompiledClass] = {}
        self._installed: list[nn.Module] = []

    def install(self) -> None:
        """Compiles nothing yet: a variant is made by the first call that needs it.

        Raises `ConfigurationError` when something else has replaced the `forward` of a block.
        """
        for block in self._blocks:
            if "forward" in vars(block):
                raise ConfigurationError(
                    f"a {type(block).__name__} cannot be compiled: its forward is wrapped already "
                    "(by offloading or an adapter); start with --enforce-eager"
                )
        if not self._blocks:
            logger.warning("nothing is compiled: the denoiser has no repeated blocks")
        for block in self._blocks:
            cls = type(block)
            if cls not in self._classes:
                self._classes[cls] = _CompiledClass(cls, self._backend, self._options)
            block.forward = _BlockForward(block, self._classes[cls])
            self._installed.append(block)

    def choose(self, shapes: Hashable) -> None:
        """Say which shapes the coming call has."""
        if len(self._static_keys) < self._static_shapes:
            self._static_keys.add(shapes)
        for compiled in self._classes.values():
            compiled.static_next = shapes in self._static_keys

    def compilations(self) -> dict[str, int]:
        """How many variants were compiled so far, by class of block."""
        return {cls.__name__: one.counter.compilations for cls, one in self._classes.items()}

    def seconds(self) -> float:
        """Spent in the compiler's backend."""
        return sum(one.counter.seconds for one in self._classes.values())

    def close(self) -> None:
        """Blocks whose `forward` somebody wrapped meanwhile are an error: undo in order."""
        while self._installed:
            block = self._installed.pop()
            ours = vars(block).get("forward")
            assert isinstance(ours, _BlockForward), f"{type(block).__name__}.forward is not ours"
            del block.forward
        self._classes.clear()
        self._static_keys.clear()


class _CountingBackend:
    """A backend of `torch.compile` that counts what it compiles."""

    def __init__(
        self, name: str, backend: str | Callable[..., Any], options: dict[str, Any]
    ) -> None:
        self.__name__ = f"counted_{name}"
        self._name = name
        self._compile = torch._dynamo.lookup_backend(backend)
        self._arguments = {"config_patches": options} if options else {}
        self.compilations = 0
        self.seconds = 0.0

    def __call__(self, graph_module: Any, example_inputs: Any) -> Any:
        started_s = time.perf_counter()
        compiled = self._compile(graph_module, example_inputs, **self._arguments)
        self.seconds += time.perf_counter() - started_s
        self.compilations += 1
        if self.compilations == _recompile_limit():
            logger.warning(
                "%s was compiled %d times, the limit: further kinds of calls run uncompiled",
                self._name,
                self.compilations,
            )
        return compiled


class _CompiledClass:
    """`forward` of one class of blocks, for one shape and for any."""

    def __init__(
        self, cls: type[nn.Module], backend: str | Callable[..., Any], options: dict[str, Any]
    ) -> None:
        self.counter = _CountingBackend(cls.__name__, backend, options)
        self.static_next = False
        self._static = _compiled(cls.forward, self.counter, dynamic=False)
        self._dynamic = _compiled(cls.forward, self.counter, dynamic=True)

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.static_next:
            return self._static(block, *args, **kwargs)
        return self._dynamic(
            block,
            *(_own_storage(value) for value in args),
            **{name: _own_storage(value) for name, value in kwargs.items()},
        )


def _compiled(
    function: Callable[..., Any], backend: _CountingBackend, *, dynamic: bool
) -> Callable[..., Any]:
    limits: dict[str, Any] = {}
    if _limits_are_ours():
        limits = {"isolate_recompiles": True, "recompile_limit": _RECOMPILE_LIMIT}
    compiled: Callable[..., Any] = torch.compile(
        function, backend=backend, dynamic=dynamic, **limits
    )
    return compiled


def _limits_are_ours() -> bool:
    """Newer versions of torch count variants for each call of `torch.compile`; before, all uses
    of a class in this process share one limit."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def _recompile_limit() -> int:
    return _RECOMPILE_LIMIT if _limits_are_ours() else torch._dynamo.config.recompile_limit


class _BlockForward:
    def __init__(self, block: nn.Module, compiled: _CompiledClass) -> None:
        self._block = block
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(self._block, *args, **kwargs)


def _own_storage(value: Any) -> Any:
    """The first block gets other shapes of projections' outputs, the others whole tensors. The
    compiler looks behind the former, so without this copy it would make each variant twice."""
    if isinstance(value, torch.Tensor) and value._is_view():
        base = value._base
        if base is not None and base.numel() == value.numel():
            return value.clone()
    return value
