"""Joint attention for Qwen-Image's blocks: no mask, no complex numbers, one operator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    apply_rotary_emb_qwen,
)

from omnistage.attention.joint_math import Projections, rotate
from omnistage.attention.joint_op import KERNEL_HEAD_SIZES, joint_attention
from omnistage.attention.joint_projections import FUSED, FusedProjections
from omnistage.contracts.errors import UnsupportedCombinationError

NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class JointAttentionProcessor(QwenDoubleStreamAttnProcessor2_0):
    """The library's processor with texts of any length in one batch and nothing masked.

    Tokens are joined as [image, text], so that the valid ones of a sample are a prefix; attention
    runs on that prefix. `fused`: on CUDA the norms' weights go into the operator, instead of the
    norms being called. `image_rotary_emb` holds real numbers (see `RealFrequencies`) or the
    library's complex ones.
    """

    def __init__(self, *, fused: bool, backend: Any = None) -> None:
        super().__init__()
        self.fused = fused
        self._attention_backend = backend

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        text_lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image (batch, image tokens, width) and text (batch, text tokens, width).

        `text_lengths`: int64 (batch,) on the CPU, valid text tokens, which must come first; None:
        all. With `encoder_hidden_states_mask` the library's own masked attention runs instead;
        both together are a `ValueError`.
        """
        if encoder_hidden_states_mask is not None or attention_mask is not None:
            if text_lengths is not None:
                raise ValueError("text_lengths and a mask exclude each other: pass one of them")
            return super().__call__(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                _as_complex(image_rotary_emb),
            )
        if encoder_hidden_states is None:
            raise ValueError("joint attention needs encoder_hidden_states, the text stream")
        image = _projections(attn, "to_qkv", hidden_states)
        text = _projections(attn, "to_added_qkv", encoder_hidden_states)
        attended = self._attend(attn, image, text, image_rotary_emb, text_lengths)
        return _projected_out(attn, *attended)

    def _attend(
        self,
        attn: Any,
        image: Projections,
        text: Projections,
        frequencies: tuple[torch.Tensor, torch.Tensor] | None,
        text_lengths: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head_dim = attn.inner_dim // attn.heads
        backend = "" if self._attention_backend is None else str(self._attention_backend.value)
        weights: list[torch.Tensor] = []
        turns: list[torch.Tensor] = []
        eps = 0.0
        if self.fused and frequencies is not None and image.q.is_cuda:
            weights, turns = [getattr(attn, name).weight for name in NORMS], [*frequencies]
            eps = attn.norm_q.eps
        else:
            norms = [getattr(attn, name) for name in NORMS]
            of_image, of_text = frequencies or (None, None)
            image = _prepared(image, head_dim, norms[0], norms[1], of_image)
            text = _prepared(text, head_dim, norms[2], norms[3], of_text)
        streams = [*image], [*text]
        return joint_attention(*streams, weights, turns, text_lengths, head_dim, eps, backend)


def _projections(attn: Any, fused_name: str, x: torch.Tensor) -> Projections:
    fused = getattr(attn, fused_name, None)
    if fused is not None:
        return Projections(*fused(x).chunk(3, dim=-1))
    return Projections(*(getattr(attn, name)(x) for name in FUSED[fused_name]))


def _prepared(
    stream: Projections, head_dim: int, norm_q: Any, norm_k: Any, turns: torch.Tensor | None
) -> Projections:
    prepared = []
    for x, norm in ((stream.q, norm_q), (stream.k, norm_k)):
        heads = x.unflatten(-1, (-1, head_dim))
        heads = heads if norm is None else norm(heads)
        heads = heads if turns is None else _rotated(heads, turns)
        prepared.append(heads.flatten(-2))
    return Projections(prepared[0], prepared[1], stream.v)


def _rotated(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    if turns.is_complex():
        rotated: torch.Tensor = apply_rotary_emb_qwen(heads, turns, use_real=False)
        return rotated
    return rotate(heads, turns)


def _projected_out(
    attn: Any, image: torch.Tensor, text: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    for layer in attn.to_out:
        image = layer(image)
    return image, attn.to_add_out(text)


def _as_complex(
    frequencies: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, ...] | None:
    """As the library's own attention wants them."""
    if frequencies is None or frequencies[0].is_complex():
        return frequencies
    return tuple(map(torch.view_as_complex, frequencies))


class RealFrequencies:
    """Forward hook of `pos_embed`: complex (tokens, head_dim / 2) becomes float32 (…, 2).

    The same shapes give the same tensors again, so that steps pay nothing and compiled blocks see
    fixed addresses. While a CUDA graph is captured nothing is kept and nothing kept is used: the
    graph would outlive the bound.
    """

    max_entries = 16

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, tuple[torch.Tensor, ...]] = OrderedDict()

    def __call__(
        self, module: Any, args: Any, kwargs: Mapping[str, Any], output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        if output[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return _as_real(output)
        key = repr((args, sorted(kwargs.items())))
        if key not in self._kept:
            self._kept[key] = _as_real(output)
        self._kept.move_to_end(key)
        while len(self._kept) > self.max_entries:
            self._kept.popitem(last=False)
        return self._kept[key]


def _as_real(output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.view_as_real(each).clone() for each in output)


def can_fuse(attn: Any) -> bool:
    """Whether the operator may take the norms' weights: plain RMS norms of one epsilon, on which
    nothing hangs (an offloaded norm brings its weight when it is called), and a head size that a
    tile of the kernel can have."""
    head_dim = attn.inner_dim // attn.heads
    norms = [getattr(attn, name) for name in NORMS]
    plain = all(_is_plain(norm) for norm in norms)
    return plain and len({norm.eps for norm in norms}) == 1 and head_dim in KERNEL_HEAD_SIZES


def _is_plain(norm: Any) -> bool:
    if type(norm) is not RMSNorm or norm.weight is None or norm.bias is not None:
        return False
    hooked = norm._forward_pre_hooks or norm._forward_hooks or "forward" in vars(norm)
    return not hooked


def install_joint_attention(transformer: Any, *, fuse: bool = True) -> Callable[[], None]:
    """Give a `QwenImageTransformer2DModel` this attention; returns what restores it exactly.

    `fuse`: q, k and v of a stream come from one product, rotation is in real numbers, which can be
    compiled, and on CUDA one kernel does norms, rotation and joining; products and norms only where
    nothing hangs on the layers. Afterwards
    `attention_kwargs={"text_lengths": ...}` may be passed to the transformer. Raises
    `UnsupportedCombinationError` for a transformer with other processors or context parallelism.
    """
    before = dict(transformer.attn_processors)
    kinds = sorted({type(processor).__name__ for processor in before.values()})
    if any(type(each) is not QwenDoubleStreamAttnProcessor2_0 for each in before.values()):
        raise UnsupportedCombinationError(
            f"joint attention replaces {QwenDoubleStreamAttnProcessor2_0.__name__} only, but this "
            f"transformer uses {', '.join(kinds)}; reset its attention processors first"
        )
    if any(each._parallel_config is not None for each in before.values()):
        raise UnsupportedCombinationError(
            "joint attention does not support context parallelism; use one of them"
        )
    backend = next(iter(before.values()))._attention_backend
    attentions = [block.attn for block in transformer.transformer_blocks]
    fused = fuse and all(map(can_fuse, attentions))
    projections = FusedProjections(attentions if fuse else ())
    transformer.set_attn_processor(JointAttentionProcessor(fused=fused, backend=backend))
    hooks = []
    if fuse:  # The library's complex numbers are faster where nothing is compiled.
        register = transformer.pos_embed.register_forward_hook
        hooks.append(register(RealFrequencies(), with_kwargs=True))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        transformer.set_attn_processor(dict(before))
        projections.undo()

    return undo
