"""Which attention kernel a stage uses, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError

DEFAULT = "sdpa"
"""torch's `scaled_dot_product_attention`, choosing its kernel itself: both libraries' default."""


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """`diffusers_name` is what `set_attention_backend` takes; None leaves the library's default.
    `devices` are the device types it runs on, empty for all."""

    name: str
    diffusers_name: str | None = None
    devices: frozenset[str] = field(default=frozenset())

    def runs_on(self, device: str) -> bool:
        return not self.devices or device.partition(":")[0] in self.devices


_CUDA = frozenset({"cuda"})
BACKENDS: Mapping[str, AttentionBackend] = {
    backend.name: backend
    for backend in (
        AttentionBackend(name=DEFAULT),
        AttentionBackend(name="math", diffusers_name="_native_math"),
        AttentionBackend(name="flash", diffusers_name="_native_flash", devices=_CUDA),
        AttentionBackend(name="cudnn", diffusers_name="_native_cudnn", devices=_CUDA),
        AttentionBackend(name="efficient", diffusers_name="_native_efficient", devices=_CUDA),
    )
}


def select_backend(device: str, requested: str | None = None) -> AttentionBackend:
    """The backend of that name for a device ("cpu", "cuda:0"), or the default for None.

    Raises `ConfigurationError` for an unknown name and `UnsupportedCombinationError` where the
    device cannot run it; both list what is allowed there.
    """
    allowed = ", ".join(name for name, backend in BACKENDS.items() if backend.runs_on(device))
    backend = BACKENDS.get(requested or DEFAULT)
    if backend is None:
        raise ConfigurationError(
            f"attention backend {requested!r} is unknown; allowed on {device}: {allowed}"
        )
    if not backend.runs_on(device):
        raise UnsupportedCombinationError(
            f"attention backend {requested!r} does not run on {device}; allowed there: {allowed}"
        )
    return backend


def apply_backend(module: Any, backend: AttentionBackend) -> None:
    """Make a `diffusers` module use it. The default touches nothing.

    The library also keeps the last one set as the default of its whole process, for attention
    that names none: stages of one process must not differ.
    """
    if backend.diffusers_name is not None:
        module.set_attention_backend(backend.diffusers_name)
