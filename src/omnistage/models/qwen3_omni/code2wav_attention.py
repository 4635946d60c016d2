"""The codec decoder's attention in pieces: keys and values of the positions that its window still
sees are carried on, in place of a cache that grows."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from omnistage.ar.generation.causal_convs import CausalConvs, StreamStep
from omnistage.ar.generation.state_pool import StatePool

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import Qwen3OmniMoeCode2Wav

_KEYS_VALUES = "keys_values"


class WindowedAttention:
    """A hook on the transformer that passes positions, a mask and the window's keys and values."""

    def __init__(self, module: Qwen3OmniMoeCode2Wav, pool: StatePool, convs: CausalConvs) -> None:
        config = module.config
        self.window: int = config.sliding_window
        self._convs = convs
        self._transformer = module.pre_transformer
        taken = signature(type(self._transformer).forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, self.window - 1, head_dim)
        pool.add(_KEYS_VALUES, shape, module.dtype)
        self._state_shape = shape
        self._handle = self._transformer.register_forward_pre_hook(
            self._put_window, with_kwargs=True
        )

    def transform(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The transformer alone, of one stream: hidden states (1, k, hidden_size), piece by piece,
        → all of them. Touches no stream's state."""
        import torch

        like = {"dtype": pieces[0].dtype, "device": pieces[0].device}
        state = torch.zeros((1, *self._state_shape), **like)
        before = torch.zeros(1, dtype=torch.int64, device=pieces[0].device)
        done = []
        for piece in pieces:
            step = StreamStep(before=before, read={_KEYS_VALUES: state})
            with self._convs.during(step), torch.no_grad():
                done.append(self._transformer(inputs_embeds=piece).last_hidden_state)
            state, before = step.written[_KEYS_VALUES], before + piece.shape[1]
        return torch.cat(done, dim=1)

    def close(self) -> None:
        self._handle.remove()

    def _put_window(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        import torch

        step = self._convs.step
        if step is None:
            return None
        hidden = kwargs["inputs_embeds"]
        count, device = hidden.shape[1], hidden.device
        positions = step.before[:, None] + torch.arange(count, device=device)
        mask = window_mask(step.before, count, self.window, hidden.dtype)
        return args, {
            **kwargs,
            "position_ids": positions,
            "attention_mask": {"sliding_attention": mask, "full_attention": mask},
            self._cache_name: _Window(step),
        }


class _Window:
    """What the attention layers update: the keys and values of the window's other positions."""

    def __init__(self, step: StreamStep) -> None:
        self._before = step.read[_KEYS_VALUES]
        self._after = step.written[_KEYS_VALUES] = self._before.new_empty(self._before.shape)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """keys, values (B, H, k, D) → (B, H, window - 1 + k, D)."""
        import torch

        joined = []
        for index, new in enumerate((keys, values)):
            joined.append(torch.cat((self._before[:, layer, index], new), dim=2))
            kept = self._before.shape[-2]
            self._after[:, layer, index] = joined[index][:, :, joined[index].shape[2] - kept :]
        return joined[0], joined[1]


def window_mask(before: torch.Tensor, count: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """(B, 1, count, window - 1 + count), to be added to scores. Of the keys the first window - 1
    are those of the positions before; of a stream's beginning some do not exist."""
    import torch

    kept = window - 1
    key = torch.arange(kept + count, device=before.device)
    ahead = key[None, :] - torch.arange(count, device=before.device)[:, None]
    in_window = (ahead >= 0) & (ahead <= kept)
    exists = before[:, None] + key[None, :] >= kept
    visible = in_window[None, None] & exists[:, None, None]
    lowest = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=before.device).masked_fill(
        ~visible, lowest
    )
