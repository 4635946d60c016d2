"""Follows what a forward pass holds and does, tensor by tensor, on whatever device it runs.

On the meta device it costs neither memory nor arithmetic, and counts as a real run would: storages
are alive for the same time, and rounded as torch's CUDA allocator rounds them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from omnistage.memory.offload.host import aligned
from omnistage.memory.planning.fusion import Step, fused_peak_bytes
from omnistage.memory.planning.signatures import (
    ATTENTION,
    COMPOSED,
    RMS_NORM,
    OpSignature,
    TensorForm,
    written,
)
from omnistage.memory.planning.sizes import ALLOCATION_BYTES


class ForwardTracker:
    """`live_bytes` and `peak_bytes` are of tensors that came into being while it was watching;
    `fused_peak_bytes` is the peak when blocks are compiled; `ops` by the path of their block."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device).type
        self.live_bytes = self.peak_bytes = self.fused_peak_bytes = 0
        self.ops: dict[str, Counter[OpSignature]] = {}
        self._path = ""
        self._known: dict[int, weakref.ref[Any]] = {}
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._steps: list[Step] = []
        self._borrowed_bytes = self._live_at_entry = self._first_number = 0

    @contextmanager
    def watching(self, *modules: torch.nn.Module) -> Iterator[None]:
        """Tensors of `modules` count as weights, not as activations."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._remember(tensor, 0)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(_OneOp(self))
            stack.enter_context(_Watcher(self))
            yield

    @contextmanager
    def blocks(self, module: torch.nn.Module, paths: tuple[str, ...]) -> Iterator[None]:
        """What runs in a block at one of `paths` is counted there, all else at ""."""
        with ExitStack() as stack:
            for path in paths:
                block = module.get_submodule(path)
                for handle in (
                    block.register_forward_pre_hook(self._entering(path)),
                    block.register_forward_hook(self._leaving),
                ):
                    stack.callback(handle.remove)
            yield

    def adopt(self, values: Any) -> None:
        """Count the storages of new tensors in here."""
        for tensor in _tensors(values):
            if tensor.device.type == self.device:
                self._remember(tensor, aligned(tensor.untyped_storage().nbytes(), ALLOCATION_BYTES))

    def borrow(self, nbytes: int) -> None:
        """Memory that an operation takes besides its results, and gives back."""
        self._borrowed_bytes = nbytes
        self._count(nbytes)

    def record(self, name: str, kind: str, args: Any, kwargs: Any, out: Any, flops: int) -> None:
        """Count an operation where it runs."""
        call, tensors = written(args, kwargs)
        signature = OpSignature(
            name=name,
            kind=kind,
            call=call,
            tensors=tuple(map(TensorForm.of, tensors)),
            flops=flops,
            nbytes=sum(tensor.nbytes for tensor in (*tensors, *_tensors(out))),
        )
        self.ops.setdefault(self._path, Counter())[signature] += 1
        if self._path:
            self._steps.append(
                Step(
                    is_pointwise=kind == "pointwise"
                    and not any(tensor.is_complex() for tensor in (*tensors, *_tensors(out))),
                    reads=frozenset(self._number(tensor) for tensor in tensors),
                    writes=tuple(
                        (number, self._sizes[number])
                        for number in map(self._number, _tensors(out))
                        if number >= self._first_number
                    ),
                    moved=frozenset(
                        self._number(tensor) for tensor in tensors if _moves(tensor, _tensors(out))
                    ),
                    borrowed_bytes=self._borrowed_bytes,
                )
            )
        self._borrowed_bytes = 0

    def _entering(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._path = path
            self._live_at_entry, self._first_number = self.live_bytes, len(self._sizes)

        return hook

    def _leaving(self, *_: Any) -> None:
        """By now only what leaves the block is alive of what it made."""
        alive = [self._numbers[key] for key in self._known]
        taken_bytes = fused_peak_bytes(self._steps, alive)
        self.fused_peak_bytes = max(self.fused_peak_bytes, self._live_at_entry + taken_bytes)
        self._path = ""
        self._steps = []

    def _number(self, tensor: torch.Tensor) -> int:
        """Of its storage; -1 for one that nobody follows."""
        return self._numbers.get(id(tensor.untyped_storage()), -1)

    def _count(self, more_bytes: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + more_bytes)
        if not self._path:
            self.fused_peak_bytes = max(self.fused_peak_bytes, self.live_bytes + more_bytes)

    def _remember(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        number = len(self._sizes)

        def gone(_: Any) -> None:
            self.live_bytes -= nbytes
            del self._known[key], self._numbers[key]

        self._known[key] = weakref.ref(storage, gone)
        self._numbers[key] = number
        self._sizes[number] = nbytes
        self.live_bytes += nbytes
        self._count()


class _Watcher(TorchDispatchMode):
    def __init__(self, tracker: ForwardTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._tracker.adopt(out)
        if not func.is_view and not _is_free(func):
            kind, flops = _cost(func, args, kwargs, out)
            self._tracker.record(str(func), kind, args, kwargs, out, flops)
        return out


class _OneOp(TorchFunctionMode):
    """Sees `COMPOSED` operations as one."""

    def __init__(self, tracker: ForwardTracker) -> None:
        super().__init__()
        self._tracker = tracker
        self._ops: dict[Any, Callable[..., Any]] = {
            COMPOSED[ATTENTION]: self._attention,
            COMPOSED[RMS_NORM]: self._rms_norm,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        special = self._ops.get(func)
        if special is None:
            return func(*args, **(kwargs or {}))
        return special(func, *args, **(kwargs or {}))

    def _attention(self, func: Any, query: Any, key: Any, value: Any, *more: Any, **named: Any):
        """Beside the result, flash-like kernels keep a float32 sum for each row of the scores."""
        tracker = self._tracker
        out = self._untracked(func, query, key, value, *more, **named)
        tracker.adopt(out)
        rows = query.numel() // query.shape[-1]
        tracker.borrow(aligned(4 * rows, ALLOCATION_BYTES))
        flops = 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        tracker.record(ATTENTION, ATTENTION, (query, key, value, *more), named, out, flops)
        return out

    def _rms_norm(self, func: Any, value: Any, *more: Any, **named: Any) -> Any:
        out = self._untracked(func, value, *more, **named)
        self._tracker.adopt(out)
        self._tracker.record(RMS_NORM, "pointwise", (value, *more), named, out, 0)
        return out

    def _untracked(self, func: Any, value: Any, *more: Any, **named: Any) -> Any:
        if value.device.type == "meta":
            if func is COMPOSED[RMS_NORM]:
                return torch.empty_like(value)
            return _attention_result(value, more[1])
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return func(value, *more, **named)


def _attention_result(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(rows, heads, tokens, width), laid out as kernels do: heads beside each other."""
    *batch, heads, tokens, _ = query.shape
    made = query.new_empty((*batch, tokens, heads, value.shape[-1]))
    return made.transpose(-3, -2)


def _cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, int]:
    counter = flop_registry.get(func._overloadpacket)
    if counter is None:
        return "pointwise", 0
    kind = "convolution" if "conv" in str(func) else "matmul"
    return kind, int(counter(*args, **kwargs, out_val=out))


def _moves(tensor: torch.Tensor, made: list[torch.Tensor]) -> bool:
    """Whether its elements, some of a storage or joined with others, change their places."""
    is_part = tensor.nbytes < tensor.untyped_storage().nbytes()
    return is_part or any(one.numel() > tensor.numel() for one in made)


def _is_free(func: Any) -> bool:
    """Allocation alone."""
    return func._overloadpacket in (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.new_empty,
        torch.ops.aten.empty_strided,
        torch.ops.aten.detach,
        torch.ops.aten._unsafe_view,
        torch.ops.aten.lift_fresh,
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves, _ = tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def total_ops(ops: Mapping[str, Counter[OpSignature]]) -> Counter[OpSignature]:
    """Of all paths together."""
    total: Counter[OpSignature] = Counter()
    for counted in ops.values():
        total.update(counted)
    return total
