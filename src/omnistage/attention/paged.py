"""Attention of `transformers` modules over a paged KV cache, through their attention interface.

Models are built with `attn_implementation=NAME` after `register()`: `transformers` makes no masks
for an implementation it has no mask function for, and every layer calls `paged_attention`. The
step that is being run is this thread's: whoever calls a module's forward wraps it in `running`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from omnistage.contracts.errors import UnsupportedCombinationError

if TYPE_CHECKING:
    import torch

NAME = "omnistage_paged"
SPARE_BLOCK = 0
"""Never allocated: what padding writes goes there."""

IGNORED_ARGUMENTS = frozenset(
    {
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""What modules hand through to attention that changes nothing of its result here: positions are in
the keys already, and the step says which keys a query sees."""


@dataclass(slots=True, eq=False)
class PagedKV:
    """One layer's cache: keys (num_blocks, block_size, kv_heads, head_dim), values (num_blocks,
    block_size, kv_heads, value_dim)."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class PagedStep:
    """What all layers of one step share. T tokens, S rows: `num_decodes` of one token each first,
    then one a chunk.

    slots (T,) int64: block * block_size + offset of each token's key and value. block_tables (S, W)
    int32. context_lens (S,) int32: keys that a row's last query sees, this step's included.
    `chunk_lens` and `chunk_contexts` are the host's: tokens of each chunk and their context_lens.
    `kv` is by `layer_idx`; `next_layer` counts calls from blocks that are compiled.
    """

    num_decodes: int
    slots: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    chunk_lens: tuple[int, ...] = ()
    chunk_contexts: tuple[int, ...] = ()
    kv: list[PagedKV]
    backend: PagedBackend
    next_layer: int = 0


class PagedBackend(Protocol):
    """The kernels. `scale` multiplies the scores; `window` is how many keys a query sees, its own
    included (None: all); `softcap` bounds the scores by tanh."""

    def begin(self, step: PagedStep) -> None:
        """Called by `running`, so not for a step that is replayed from a graph."""
        return None

    def write(
        self, kv: PagedKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """key (T, kv_heads, head_dim), value (T, kv_heads, value_dim) to their slots (T,)."""
        ...

    def write_and_decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: PagedKV,
        step: PagedStep,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """A step of decode rows only: `write`, then `decode`."""
        self.write(kv, key, value, step.slots)
        tables, contexts = step.block_tables, step.context_lens
        return self.decode(query, kv, tables, contexts, scale=scale, window=window, softcap=softcap)

    def decode(
        self,
        query: torch.Tensor,
        kv: PagedKV,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query (S_d, heads, head_dim), one a row → (S_d, heads, value_dim)."""
        ...

    def chunk(
        self,
        query: torch.Tensor,
        kv: PagedKV,
        block_table: torch.Tensor,
        context: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query (t, heads, head_dim): the last t of `context` positions of one sequence with
        block_table (W,), causal → (t, heads, value_dim)."""
        raise NotImplementedError

    def chunks(
        self,
        query: torch.Tensor,
        kv: PagedKV,
        step: PagedStep,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query (sum of chunk_lens, heads, head_dim): all chunks of `step`; one by one by `chunk`
        where a backend has nothing better."""
        import torch

        attended, first = [], 0
        for index, (length, context) in enumerate(
            zip(step.chunk_lens, step.chunk_contexts, strict=True)
        ):
            table = step.block_tables[step.num_decodes + index]
            part = query[first : first + length]
            attended.append(
                self.chunk(part, kv, table, context, scale=scale, window=window, softcap=softcap)
            )
            first += length
        return torch.cat(attended)


_current_step: ContextVar[PagedStep | None] = ContextVar("paged_step", default=None)


@contextmanager
def running(step: PagedStep) -> Iterator[PagedStep]:
    """Modules called inside attend over `step`, in this thread."""
    step.backend.begin(step)
    step.next_layer = 0
    token = _current_step.set(step)
    try:
        yield step
    finally:
        _current_step.reset(token)


def register() -> str:
    """Make `paged_attention` known to `transformers` as `NAME`. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    return NAME


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, heads, T, head_dim), key (1, kv_heads, T, head_dim), value (1, kv_heads, T,
    value_dim) → ((1, T, heads, value_dim), None), the form of `transformers` attention functions.

    Raises `UnsupportedCombinationError` for an argument that would change the result and is none of
    those above.
    """
    import torch

    _refuse_others(module, others, attention_mask, dropout, is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_dynamo_compiling():
        attended = torch.ops.omnistage.paged_attention(
            query, key, value, scale, sliding_window or 0, softcap or 0.0
        )
        return attended, None
    step = _step()
    kv = step.kv[_layer_idx(module)]
    return _attend_layer(step, kv, query, key, value, scale, sliding_window, softcap), None


def attend_next_layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The same for a compiled block, which must not know which layer it is: one block's code serves
    them all. Layers come in order, each once; the gate at load has seen to that."""
    step = _step()
    kv = step.kv[step.next_layer]
    step.next_layer += 1
    return _attend_layer(step, kv, query, key, value, scale, window, softcap)


def _step() -> PagedStep:
    step = _current_step.get()
    if step is None:
        raise RuntimeError("paged attention was called outside of a step (see `running`)")
    return step


def _attend_layer(
    step: PagedStep,
    kv: PagedKV,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    if not step.chunk_lens:
        how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        return step.backend.write_and_decode(q, k, v, kv, step, **how).unsqueeze(0)
    step.backend.write(kv, k, v, step.slots)
    return _attend(step, q, kv, scale, window, softcap).unsqueeze(0)


def _attend(
    step: PagedStep,
    query: torch.Tensor,
    kv: PagedKV,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    import torch

    decodes = step.num_decodes
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    parts = []
    if decodes:
        tables, contexts = step.block_tables[:decodes], step.context_lens[:decodes]
        parts.append(step.backend.decode(query[:decodes], kv, tables, contexts, **how))
    if step.chunk_lens:
        parts.append(step.backend.chunks(query[decodes:], kv, step, **how))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _layer_idx(module: torch.nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnsupportedCombinationError(
            f"{type(module).__name__} has no layer_idx, so its keys have no place in a paged cache"
        )
    return index


def _refuse_others(
    module: torch.nn.Module,
    others: dict[str, Any],
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
) -> None:
    wanted = [
        name
        for name, value in others.items()
        if value is not None and value is not False and name not in IGNORED_ARGUMENTS
    ]
    if attention_mask is not None:
        wanted.append("attention_mask")
    if dropout:
        wanted.append(f"dropout={dropout}")
    if is_causal is False:
        wanted.append("is_causal=False")
    if wanted:
        raise UnsupportedCombinationError(
            f"{type(module).__name__} asks attention for {', '.join(wanted)}, which paged "
            "attention does not do"
        )
