"""Linear layers with float8 weights (E4M3, one scale a row), made of plain tensors.

Plain tensors and no subclass of one: offloading moves them as bytes and rebinds `param.data`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from omnistage.contracts.errors import UnsupportedCombinationError

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of E4M3."""
MULTIPLE = 16
"""What both sides of a weight must be multiples of where float8 is multiplied (cuBLASLt)."""
VERSION = 1
"""Of what `quantize_rows` computes; part of the keys of caches."""

_CACHED_ITEMS = 2**17
"""How much is widened at a time for each thread of a CPU: what its cache holds (measured on one:
four times as fast as whole layers)."""
_DEVICE_ITEMS = 2**25


@torch.no_grad()
def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, in) of a floating dtype to float8_e4m3fn (out, in) and its scales, float32 (out, 1).

    A scale is its row's largest magnitude over 448, in float32; 1 for a row of zeros. Takes a few
    rows at a time, so that float32 copies stay small.
    """
    quantized = torch.empty_like(weight, dtype=DTYPE, memory_format=torch.contiguous_format)
    scales = weight.new_empty((weight.shape[0], 1), dtype=torch.float32)
    if weight.is_meta:
        return quantized, scales
    on_cpu = weight.device.type == "cpu"
    items = _CACHED_ITEMS * torch.get_num_threads() if on_cpu else _DEVICE_ITEMS
    rows = max(1, items // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        quantized[part], scales[part] = scaled_rows(weight[part])
    return quantized, scales


def scaled_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize_rows`, for rows that are few."""
    wide = x.to(torch.float32)
    scale = wide.abs().amax(dim=-1, keepdim=True) / LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / scale).clamp_(-LARGEST, LARGEST).to(DTYPE), scale


class Fp8Linear(nn.Module):
    """As `nn.Linear`, with `weight` float8_e4m3fn (out, in) and `weight_scale` float32.

    `weight_scale` is (out, 1), or of another shape with one number a row or one for all, as a
    checkpoint stores it. `compute` is "bf16" (the weight is dequantized in float32, rounded once
    to the input's dtype, and multiplied as any) or "fp8" (inputs are quantized by row; the product
    is bfloat16, whatever the input's dtype, then cast to it). A layer whose sides are no multiples
    of 16 always computes "bf16".
    """

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: nn.Parameter | None = None,
        *,
        compute: str = "bf16",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(weight_scale, requires_grad=False)
        self.bias = bias
        fits = self.in_features % MULTIPLE == 0 == self.out_features % MULTIPLE
        self.compute = compute if fits else "bf16"

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, compute: str = "bf16") -> Fp8Linear:
        """Quantized where the layer's weight is, also on the meta device. Shares its bias."""
        weight, scale = quantize_rows(linear.weight)
        return cls(weight, scale, linear.bias, compute=compute).train(linear.training)

    @classmethod
    def empty_like(
        cls, linear: nn.Linear, scale_shape: tuple[int, ...], *, compute: str = "bf16"
    ) -> Fp8Linear:
        """To be filled from a checkpoint; on the layer's device."""
        weight = torch.empty_like(linear.weight, dtype=DTYPE)
        scale = linear.weight.new_empty(scale_shape, dtype=torch.float32)
        return cls(weight, scale, linear.bias, compute=compute).train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out), in the dtype of `x`."""
        if self.compute == "fp8":
            return self._multiply_float8(x)
        return F.linear(x, self.dequantized(x.dtype), self.bias)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight times its scales, rounded once to `dtype`; (out, in)."""
        weight = self.weight.to(dtype)  # exact: every number of E4M3 is one of any wider dtype
        return weight.mul_(self.weight_scale.reshape(-1, 1))

    def _multiply_float8(self, x: torch.Tensor) -> torch.Tensor:
        rows, row_scales = scaled_rows(x.reshape(-1, self.in_features))
        scales = self.weight_scale.reshape(1, -1).expand(1, self.out_features).contiguous()
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        out = torch._scaled_mm(
            rows,
            self.weight.t(),
            scale_a=row_scales,
            scale_b=scales,
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=x.is_cuda,
        )
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Linear:
        """`module.to(dtype)` moves weight and scale and casts neither: another dtype would be
        another layer."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            is_own = tensor is self.weight or tensor is self.weight_scale
            return tensor.to(moved.device) if is_own and moved.dtype != tensor.dtype else moved

        super()._apply(kept, recurse)
        return self

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, compute={self.compute}"
        )


def resolve_compute(compute: str, device: str, *, float8: bool) -> str:
    """ "bf16" or "fp8" for what was asked. `float8`: whether the device multiplies it itself.

    Raises `UnsupportedCombinationError` when "fp8" was asked of a device that cannot at all.
    """
    if compute == "auto":
        return "fp8" if float8 else "bf16"
    reason = None if compute != "fp8" or float8 else _float8_refusal(device)
    if reason:
        raise UnsupportedCombinationError(
            f"fp8 compute does not work on {device} ({reason}); use compute bf16 or auto"
        )
    return compute


def _float8_refusal(device: str) -> str | None:
    """Found by multiplying a little."""
    one = torch.ones(MULTIPLE, MULTIPLE)
    try:
        layer = Fp8Linear(*quantize_rows(one), compute="fp8").to(device)
        layer(one.to(device))
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None
