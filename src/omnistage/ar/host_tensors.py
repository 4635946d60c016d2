"""Small values from the host to a device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def to_device(
    values: Sequence[Any] | torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """`values` as a tensor on `device`, in order with the current stream. From memory that is not
    pinned torch would wait until every step in flight is done."""
    import torch

    host = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
