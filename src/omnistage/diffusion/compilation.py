"""Regional compilation: the repeated blocks of a denoiser, never the whole of it."""

from __future__ import annotations

import functools
import inspect
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from omnistage.contracts.errors import ConfigurationError
from omnistage.diffusion.compiler_settings import sizes_told_apart
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
    """The repeated blocks of one module, compiled; `close` makes module and blocks what they were.

    All blocks of a class share one compiled function, and calls of any shape share its kernels,
    but for `for_shapes`. torch's automatic choice is not used: it finds one changing dimension at
    a time and gives up silently at its limit of 8 variants, which four changes reach.

    Only `forward` is compiled: hooks on a block stay outside.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        coordinate_descent: bool = False,
        static_shapes: int = 0,
        backend: str | Callable[..., Any] = "inductor",
        on_compile: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_compile` is called before each variant is compiled."""
        self._module = module
        self._blocks = repeated_blocks(module)
        self._options = {"coordinate_descent_tuning": True} if coordinate_descent else {}
        self._static_shapes = static_shapes
        self._backend = backend
        self._on_compile = on_compile
        self._static_keys: set[Hashable] = set()
        self._classes: dict[type[nn.Module], _CompiledClass] = {}
        self._replaced: list[tuple[nn.Module, Any, Any]] = []

    def install(self) -> None:
        """Compiles nothing yet: a variant is made by the first call that needs it. That call may
        raise `ConfigurationError`, from the module's `forward`.

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
            return
        for block in self._blocks:
            cls = type(block)
            if cls not in self._classes:
                counter = _CountingBackend(
                    cls.__name__, self._backend, self._options, self._on_compile
                )
                self._classes[cls] = _CompiledClass(cls, counter)
            self._replace_forward(block, functools.partial(self._classes[cls], block))
        self._replace_forward(self._module, _scoped_forward(self._module))

    @contextmanager
    def for_shapes(self, shapes: Hashable) -> Iterator[None]:
        """The calls inside have these shapes: the first `static_shapes` that come up get kernels
        of exactly that shape."""
        if len(self._static_keys) < self._static_shapes:
            self._static_keys.add(shapes)
        static = shapes in self._static_keys
        try:
            for compiled in self._classes.values():
                compiled.static = static
            yield
        finally:
            for compiled in self._classes.values():
                compiled.static = False

    def compilations(self) -> dict[str, int]:
        """How many variants were compiled so far, by class of block."""
        return {cls.__name__: one.counter.compilations for cls, one in self._classes.items()}

    def seconds(self) -> float:
        """Spent in the compiler's backend."""
        return sum(one.counter.seconds for one in self._classes.values())

    def close(self) -> None:
        """What wrapped a `forward` after `install` must be undone before."""
        while self._replaced:
            part, before, ours = self._replaced.pop()
            assert vars(part).get("forward") is ours, f"{type(part).__name__}.forward is not ours"
            if before is None:
                del part.forward
            else:
                part.forward = before
        self._classes.clear()
        self._static_keys.clear()

    def _replace_forward(self, part: nn.Module, forward: Any) -> None:
        self._replaced.append((part, vars(part).get("forward"), forward))
        part.forward = forward


def _scoped_forward(module: nn.Module) -> Callable[..., Any]:
    """`module.forward` as compiled blocks need it: under their settings, and with the compiler's
    errors told as ours."""
    forward = module.forward

    @functools.wraps(forward)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with sizes_told_apart:
            try:
                return forward(*args, **kwargs)
            except TorchDynamoException as error:
                raise _explained(module, error) from error

    return scoped


def _explained(module: nn.Module, error: TorchDynamoException) -> Exception:
    cause = getattr(error, "inner_exception", None)
    if isinstance(cause, torch.OutOfMemoryError):
        return cause
    first_line = str(error).strip().partition("\n")[0]
    return ConfigurationError(
        f"{type(module).__name__} cannot be compiled ({first_line}); start with --enforce-eager",
        detail="".join(traceback.format_exception(error)),
    )


class _CountingBackend:
    """A backend of `torch.compile` that counts what it compiles."""

    def __init__(
        self,
        name: str,
        backend: str | Callable[..., Any],
        options: dict[str, Any],
        on_compile: Callable[[], None],
    ) -> None:
        self.__name__ = f"counted_{name}"
        self._on_compile = on_compile
        self._name = name
        self._compile = torch._dynamo.lookup_backend(backend)
        self._arguments = {"config_patches": options} if options else {}
        self.compilations = 0
        self.seconds = 0.0

    def __call__(self, graph_module: Any, example_inputs: Any) -> Any:
        self._on_compile()
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

    def __init__(self, cls: type[nn.Module], counter: _CountingBackend) -> None:
        self.counter = counter
        self.static = False
        self._fixed = _compiled(cls.forward, self.counter, dynamic=False)
        self._any = _compiled(cls.forward, self.counter, dynamic=True)

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.static:
            return self._fixed(block, *args, **kwargs)
        return self._any(
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


def _own_storage(value: Any) -> Any:
    """The first block gets other shapes of projections' outputs, the others whole tensors. The
    compiler looks behind the former, so without this copy it would make each variant twice."""
    if isinstance(value, torch.Tensor) and value._is_view():
        base = value._base
        if base is not None and base.numel() == value.numel():
            return value.clone()
    return value
