"""Layers of diffusers replaced by ones that do the same in fewer kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from torch import nn

_HALF = (torch.bfloat16, torch.float16)
_PROBED_ROWS = 256


class FusedGELU(nn.Module):
    """`GELU` of diffusers with the tanh form, computed in the epilogue of its matrix product.

    Holds the same `proj`. Where the fused kernel does not apply (another device or dtype, an
    adapter in place of the linear layer) it computes what the original does, by the same calls.
    """

    def __init__(self, original: GELU, device_type: str = "cuda") -> None:
        super().__init__()
        self.proj = original.proj
        self.device_type = device_type
        self.train(original.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., channels in) to (..., channels out)."""
        proj = self.proj
        applies = (
            type(proj) is nn.Linear
            and x.device.type == self.device_type
            and x.dtype == proj.weight.dtype
            and x.dtype in _HALF
        )
        if not applies:
            return F.gelu(proj(x), approximate="tanh")
        return linear_gelu_tanh(x, proj.weight, proj.bias)


def linear_gelu_tanh(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`gelu(linear(x))` as one matrix product; on CUDA GELU takes its tanh form there."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return out.reshape(*x.shape[:-1], out.shape[-1])


class FusedLayers:
    """What was replaced in one module; `close` puts the originals back.

    Layers run on `device`, where fused ones are for `device_type`; with `weights_move`, wherever
    their weights are now.
    """

    def __init__(
        self, device_type: str = "cuda", *, device: str | None = None, weights_move: bool = False
    ) -> None:
        self._device_type = device_type
        self._device = device or device_type
        self._weights_move = weights_move and torch.device(self._device).type == device_type
        self._replaced: list[tuple[nn.Module, str, GELU, FusedGELU]] = []

    def __len__(self) -> int:
        return len(self._replaced)

    def install(self, module: nn.Module) -> None:
        """Replace every layer that can be and whose kernel is at least as exact here."""
        trusted: dict[tuple[Any, ...], bool] = {}
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if not is_fusable(child, None if self._weights_move else self._device_type):
                    continue
                kind = (child.proj.weight.shape, child.proj.weight.dtype)
                if kind not in trusted:
                    trusted[kind] = is_as_exact(*kind, self._device)
                if trusted[kind]:
                    fused = FusedGELU(child, self._device_type)
                    setattr(parent, name, fused)
                    self._replaced.append((parent, name, child, fused))

    def close(self) -> None:
        """Adapters that replaced a fused layer's `proj` meanwhile stay."""
        for parent, name, original, fused in reversed(self._replaced):
            original.proj = fused.proj
            original.train(fused.training)
            setattr(parent, name, original)
        self._replaced.clear()


def is_fusable(layer: nn.Module, device_type: str | None = "cuda") -> bool:
    """Whether it is diffusers' `GELU` in its tanh form over a plain half-precision linear layer
    with a bias on such a device (None: on any), and nobody hooked into either."""
    if type(layer) is not GELU or layer.approximate != "tanh":
        return False
    proj = layer.proj
    return (
        type(proj) is nn.Linear
        and proj.bias is not None
        and device_type in (None, proj.weight.device.type)
        and proj.weight.dtype in _HALF
        and proj.bias.dtype == proj.weight.dtype
        and not _is_hooked(layer)
        and not _is_hooked(proj)
    )


@torch.no_grad()
def is_as_exact(shape: torch.Size, dtype: torch.dtype, device: str) -> bool:
    """Whether the fused kernel errs no more (root mean square) than the separate ones against
    float32, on random input of unit variance and random weights of `shape` (outputs, inputs) that
    keep it: a layer's own may be on the host."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    weight = (draw(*shape) * shape[1] ** -0.5).to(dtype)
    bias = (draw(shape[0]) * 0.1).to(dtype)
    x = draw(_PROBED_ROWS, shape[1]).to(dtype)
    exact = F.gelu(F.linear(x.float(), weight.float(), bias.float()), approximate="tanh")
    separate = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    fused = linear_gelu_tanh(x, weight, bias)
    return _distance(fused, exact) <= _distance(separate, exact)


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).square().mean())


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or hasattr(module, "parametrizations")
    )
