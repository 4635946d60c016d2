"""A pipeline's denoising module as the step loop calls it: compiled, fused, replayed where on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from omnistage.platforms.base import Platform


@dataclass(frozen=True, kw_only=True)
class DenoiserSettings:
    """What may be done to a denoiser for speed.

    `graphs` replays captured graphs for calls of up to `graph_max_tokens` (batch x sequence, text
    included), at most `max_graphs` of them held. `coordinate_descent` lets the compiler try more
    variants of reductions, which lengthens a compilation.
    """

    compile: bool = True
    graphs: bool = True
    graph_max_tokens: int = 8192
    max_graphs: int = 16
    coordinate_descent: bool = False


class Denoiser:
    """A pipeline's denoising module as the step loop calls it: compiled by blocks and replayed
    from captured graphs where that is on."""

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
        self._eager = eager
        self._settings = settings

    def install(self) -> None:
        """Raises `ConfigurationError`."""

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Equals `module(**inputs, return_dict=False)[0]`, without gradients."""
        import torch

        with torch.no_grad():
            output: torch.Tensor = self.module(**inputs, return_dict=False)[0]
        return output

    def describe(self) -> dict[str, Any]:
        return {"eager": self._eager}

    def compilations(self) -> int:
        """How many block variants were compiled so far."""
        return 0

    def close(self) -> None:
        """Undo what `install` did."""
