"""Reads single tensors of safetensors files, each file opened once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class TensorFiles:
    """Files opened as they are asked for, closed with the context."""

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}
        self._contexts = ExitStack()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._contexts.close()

    def read(self, file: Path, key: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor, on the host: a private mapping of its file. Raises `CheckpointError` when it
        cannot be read, or is not what a plan expects, since the file changed."""
        with _named(file):
            tensor: torch.Tensor = self._open(file).get_tensor(key)
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != (dtype, shape):
            raise CheckpointError(
                f"{file} changed while it was being loaded: {key!r} is {found[0]} "
                f"{list(found[1])} now, planned were {dtype} {list(shape)}"
            )
        return tensor

    def _open(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            opening = safe_open(file, framework="pt", device="cpu")
            self._opened[file] = self._contexts.enter_context(opening)
        return self._opened[file]


@contextmanager
def _named(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
