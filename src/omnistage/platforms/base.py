"""What the rest of OmniStage may ask of hardware, without naming a vendor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from omnistage.contracts.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device as this process sees it. `name` is what `--device` and torch take ("cuda:0",
    "cpu"); `free_bytes` is None where nobody says."""

    name: str
    index: int
    label: str
    total_bytes: int
    free_bytes: int | None
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """`allocated_bytes` in use by this process, `reserved_bytes` held by its allocator, the
    highest `peak_bytes` of the first, and what the whole device has."""

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    free_bytes: int | None
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What was found to work on a device. `attention_kernels` are those of torch's
    `scaled_dot_product_attention` ("flash", "cudnn", "efficient", "math") that ran on it."""

    device: str
    label: str
    compute_capability: tuple[int, int] | None
    attention_kernels: tuple[str, ...]
    triton: str | None
    """Version of the installed package, on devices that it compiles for."""
    bfloat16: bool
    float8: bool
    """Whether the device multiplies float8 matrices itself."""


class PageLockError(RuntimeError):
    """The system did not page-lock host memory, or not unlock it."""


class Event(Protocol):
    """Named and behaving as `torch.cuda.Event`."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`."""


class Stream(Protocol):
    """Named and behaving as `torch.cuda.Stream`."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CapturedGraph(Protocol):
    """Work recorded once, named and behaving as `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Do the work again, on the current stream, with what its tensors hold now."""

    def reset(self) -> None:
        """Free the graph's own memory."""


class Platform(Protocol):
    """One kind of device. Implementations derive from this class and override what differs.

    Methods without a `device` never create a device context. Devices are named as in torch.
    """

    device_type: str

    def unavailable_reason(self) -> str | None:
        """Why no device of this kind can be used here, or None."""
        return None

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices this process may use, by index; empty when the kind is unavailable."""
        ...

    def default_device(self) -> str:
        """The first device. Raises `ConfigurationError` when there is none."""
        return self.validate_device(self.device_type)

    def validate_device(self, device: str) -> str:
        """The full name of `device` ("cuda" is "cuda:0").

        Raises `ConfigurationError` when it is malformed, of another kind, or absent.
        """
        kind, index = parse_device(device)
        if kind != self.device_type:
            raise ConfigurationError(f"{device!r} is no {self.device_type.upper()} device")
        reason = self.unavailable_reason()
        if reason:
            raise ConfigurationError(
                f"no {self.device_type.upper()} device for {device!r}: {reason}; use --device cpu"
            )
        names = [info.name for info in self.devices()]
        full_name = f"{self.device_type}:{index or 0}"
        if full_name not in names:
            raise ConfigurationError(
                f"no {self.device_type.upper()} device {device!r}; use --device cpu or one of: "
                + ", ".join(names)
            )
        return full_name

    def device_info(self, device: str) -> DeviceInfo:
        """Raises `ConfigurationError` as `validate_device` does."""
        name = self.validate_device(device)
        return next(info for info in self.devices() if info.name == name)

    def default_dtype(self, device: str) -> str:
        """torch's name of the dtype that models run in when nobody says otherwise."""
        ...

    def stream(self, device: str) -> Stream: ...

    def current_stream(self, device: str) -> Stream: ...

    def stream_scope(self, stream: Stream) -> AbstractContextManager[Any]:
        """Work started inside runs on `stream`."""
        ...

    def adopt_stream(self, device: str, *, urgent: bool = False) -> None:
        """From now on this thread's work goes to a stream of its own: threads that share a device
        do not queue behind each other. Where both wait, `urgent` work goes first."""
        return None

    def event(self, device: str, *, timing: bool = False) -> Event: ...

    def synchronize(self, device: str) -> None:
        """Wait for all work on the device."""
        ...

    def graphs_unavailable_reason(self) -> str | None:
        """Why work cannot be captured on devices of this kind, or None."""
        return f"{self.device_type.upper()} devices have no captured graphs"

    def graph_pool(self, device: str) -> Any:
        """What graphs share that reuse each other's memory: none may rely on what it left in its
        results when another has been replayed since."""
        ...

    def capture_graph(
        self, device: str, work: Callable[[], Any], *, pool: Any, stream: Stream
    ) -> tuple[CapturedGraph, Any]:
        """Run `work` once on `stream`, then record it there, together with its result, which holds
        something only after a replay. Other threads may go on using the device.

        Raises what `work` raises, and `RuntimeError` for work that cannot be captured.
        """
        ...

    def offload_unavailable_reason(self) -> str | None:
        """Why weights cannot wait on the host and be copied in, or None."""
        return None

    def upload(self, destination: Any, source: Any) -> None:
        """Start copying a host tensor into a device tensor of the same size, on the current stream.
        Returns at once for page-locked memory; any other is read before this returns."""
        destination.copy_(source, non_blocking=True)

    def enqueue(self, work: Callable[[], None]) -> None:
        """Call `work`, which starts something on the current stream that no method here does (a
        collective). Where streams are simulated it is called in its turn."""
        work()

    def lock_pages(self, address: int, nbytes: int, device: str, *, read_only: bool) -> None:
        """Page-lock mapped host memory, so that the device can copy from it by itself. `address`
        and `nbytes` are multiples of the page size.

        Raises `PageLockError` when the system refuses; then nothing has changed.
        """
        raise PageLockError(f"{self.device_type.upper()} devices lock no pages")

    def unlock_pages(self, address: int, device: str) -> None:
        """Undo `lock_pages`. No copy from there may be under way. Raises `PageLockError`."""
        raise PageLockError(f"{self.device_type.upper()} devices lock no pages")

    def limit_memory(self, device: str, limit_bytes: int | None) -> None:
        """Bound what this process's allocator takes of a device; None: no bound. Beyond it an
        allocation fails as on a full device."""
        raise ConfigurationError(f"the memory of {device} cannot be bounded")

    def memory_stats(self, device: str) -> MemoryStats: ...

    def peak_memory_mb(self, device: str, *, reset: bool = False) -> float:
        """Highest use by this process since the last reset, in 10^6 bytes; then reset if asked."""
        ...

    def empty_cache(self, device: str) -> None:
        """Give memory that the allocator holds unused back to the device."""
        ...

    def capabilities(self, device: str) -> Capabilities:
        """Found by trying, so the first call on a device may take seconds."""
        ...


def parse_device(device: str) -> tuple[str, int | None]:
    """("cuda", 1) for "cuda:1", ("cpu", None) for "cpu".

    Raises `ConfigurationError` for anything of another form.
    """
    kind, colon, index = device.partition(":")
    if not (kind.isascii() and kind.isidentifier()) or (colon and not _is_number(index)):
        raise ConfigurationError(
            f"malformed device {device!r}; allowed are names such as cpu, cuda and cuda:1"
        )
    return kind, int(index) if colon else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text
