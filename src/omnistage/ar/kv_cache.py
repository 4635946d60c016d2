"""The paged cache of keys, values and per-position states: how many blocks, and their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.ar.cache_spec import LayerSpec
from omnistage.attention.paged import PagedKV
from omnistage.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from omnistage.ar.options import TokenOptions

GIB = 1 << 30
CPU_KV_CACHE_GIB = 1.0
BLOCK_SIZE = 16
RESERVE_FRACTION = 0.02
"""Of a GPU's memory, left for fragments and what kernels allocate beside torch."""

StateSpecs = Mapping[str, tuple[tuple[int, ...], "torch.dtype"]]


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """`num_blocks` counts the spare block 0. `max_model_len` is the longest sequence in tokens."""

    num_blocks: int
    block_size: int
    max_model_len: int
    token_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.token_bytes

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """A device with the weights loaded and one widest step measured, in bytes."""

    total_bytes: int
    free_bytes: int
    weight_bytes: int
    step_bytes: int


def token_bytes(layers: Iterable[LayerSpec], states: StateSpecs, dtype: torch.dtype) -> int:
    """What one position takes in all layers and states."""
    kept = sum(layer.token_bytes(dtype.itemsize) for layer in layers)
    return kept + sum(_numel(shape) * kind.itemsize for shape, kind in states.values())


def cache_bytes(options: TokenOptions, memory: DeviceMemory | None) -> int:
    """The cache's size by `kv_cache_gib`, else 1 GiB on a CPU (`memory` None), else what weights
    and a step leave of `gpu_memory_utilization`.

    Raises `ConfigurationError` when nothing is left, with what would do.
    """
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * GIB)
    if memory is None:
        return int(CPU_KV_CACHE_GIB * GIB)
    reserve = int(RESERVE_FRACTION * memory.total_bytes)
    needed = memory.weight_bytes + memory.step_bytes + reserve
    left = int(options.gpu_memory_utilization * memory.total_bytes) - needed
    available = min(left, memory.free_bytes - memory.step_bytes - reserve)
    if available <= 0:
        raise ConfigurationError(
            f"no memory is left for the KV cache: weights take {memory.weight_bytes / GIB:.2f} GiB "
            f"and a step {memory.step_bytes / GIB:.2f} GiB of the {memory.total_bytes / GIB:.1f} "
            f"GiB on the device ({memory.free_bytes / GIB:.2f} GiB free), of which "
            f"gpu_memory_utilization={options.gpu_memory_utilization:g} may be used; raise it to "
            f"more than {needed / memory.total_bytes:.2f}, lower max_num_batched_tokens, or free "
            "the device"
        )
    return available


def plan_cache(
    options: TokenOptions, *, bytes_per_token: int, model_limit: int, budget_bytes: int
) -> CachePlan:
    """Whole blocks within `budget_bytes`, at most what twice `max_num_seqs` longest sequences take.

    Without a `max_model_len`, sequences are as long as the model (`model_limit` tokens) and the
    cache allow. Raises `ConfigurationError` for a `max_model_len` that either does not hold.
    """
    block_size = options.block_size or BLOCK_SIZE
    wanted = options.max_model_len
    if wanted is not None and wanted > model_limit:
        raise ConfigurationError(
            f"max_model_len is {wanted}, but the model's positions end at {model_limit}; give at "
            "most that"
        )
    fitting = budget_bytes // (bytes_per_token * block_size) if bytes_per_token else 1 << 20
    capacity = max(0, fitting - 1) * block_size
    if capacity < (wanted or block_size):
        longest = f"one sequence of max_model_len={wanted}" if wanted else "one block"
        raise ConfigurationError(
            f"a KV cache of {budget_bytes / GIB:.3g} GiB holds {capacity} tokens "
            f"({bytes_per_token} bytes each), less than {longest}; "
            f"{_what_fits(capacity, wanted, bytes_per_token, block_size)}"
        )
    max_model_len = wanted or min(model_limit, capacity)
    useful = 2 * options.max_num_seqs * -(-max_model_len // block_size) + 1
    return CachePlan(
        num_blocks=min(fitting, useful),
        block_size=block_size,
        max_model_len=max_model_len,
        token_bytes=bytes_per_token,
    )


def _what_fits(capacity: int, wanted: int | None, bytes_per_token: int, block_size: int) -> str:
    tokens = (wanted or block_size) + 2 * block_size
    needed = f"set kv_cache_gib to at least {tokens * bytes_per_token / GIB:.3g}"
    return f"{needed}, or max_model_len to at most {capacity}" if wanted and capacity else needed


class KVCache:
    """One pool of keys and one of values a layer, one pool a state; zeros until written.

    `layers` by `layer_idx`; `states` by name, each (num_blocks, block_size, …).
    """

    def __init__(
        self,
        plan: CachePlan,
        layers: Sequence[LayerSpec],
        states: StateSpecs,
        *,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        import torch

        self.plan = plan
        head = (plan.num_blocks, plan.block_size)

        def pool(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(*head, *shape, dtype=kind, device=device)

        self.layers = [
            PagedKV(
                pool(layer.num_kv_heads, layer.head_dim), pool(layer.num_kv_heads, layer.value_dim)
            )
            for layer in layers
        ]
        self.states = {name: pool(*shape, kind=kind) for name, (shape, kind) in states.items()}

    def write_states(self, states: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        """states (T, …) by name to slots (T,) int64. Capturable."""
        for name, pool in self.states.items():
            pool.flatten(0, 1).index_copy_(0, slots, states[name])

    def read_states(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of the states at slots (P,) int64, each (P, …)."""
        return {
            name: pool.flatten(0, 1).index_select(0, slots) for name, pool in self.states.items()
        }


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
