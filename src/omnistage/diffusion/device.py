"""What the runtime asks of its device: memory figures, and an end to queued work."""

from __future__ import annotations

MIB = 2**20


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def reset_peak(device: str) -> None:
    if is_cuda(device):
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: str) -> float | None:
    """Highest MiB of device memory in use since `reset_peak`; None where nobody counts it."""
    if not is_cuda(device):
        return None
    import torch

    return torch.cuda.max_memory_allocated(device) / MIB


def synchronize(device: str) -> None:
    if is_cuda(device):
        import torch

        torch.cuda.synchronize(device)


def empty_cache(device: str) -> None:
    if is_cuda(device):
        import torch

        torch.cuda.empty_cache()
