"""Which kernels of `scaled_dot_product_attention` run on a device, found by running them."""

from __future__ import annotations

import warnings


def usable_attention_kernels(device: str, dtype: str) -> tuple[str, ...]:
    """Names of the kernels that attend over a (1, 2, 64, 64) tensor of `dtype` on `device`."""
    from torch.nn.attention import SDPBackend

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return tuple(name for name, backend in backends.items() if _runs(backend, device, dtype))


def _runs(backend: object, device: str, dtype: str) -> bool:
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    x_BHLD = torch.zeros(1, 2, 64, 64, dtype=getattr(torch, dtype), device=device)
    try:
        with warnings.catch_warnings(), sdpa_kernel([backend]), torch.no_grad():
            warnings.simplefilter("ignore")
            scaled_dot_product_attention(x_BHLD, x_BHLD, x_BHLD)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True
