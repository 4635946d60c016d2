"""What others put into loading: a conversion of blocks, and a cache of what loading made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from omnistage.memory.host.layout import BlockLayout
from omnistage.memory.offload.host import HostWeights

if TYPE_CHECKING:
    import torch

    from omnistage.memory.plan import LoadPlan


class BlockTransform(Protocol):
    """Converts the modules of one component while it is loaded (quantization)."""

    key: str
    """Method, settings and version: what decides the bytes that come out, for a cache's key."""

    def __call__(self, module: torch.nn.Module, path: str) -> None:
        """Convert, in place, what is to be converted at and below `path` of `module`, the
        component; "" is all of it. What is converted already is left alone.

        Called for each block when its tensors have been read, before they move to the host, and
        for the whole at the end. Called as well with tensors on the meta device, to learn names,
        shapes and dtypes: these must come out the same.
        """


class WeightCache(Protocol):
    """Keeps the images of streamed blocks on disk. Errors of its own are its own to log: loading
    goes on without it."""

    def lookup(
        self, plan: LoadPlan, layouts: Mapping[str, BlockLayout], transform: BlockTransform | None
    ) -> HostWeights | None:
        """An entry whose blocks have exactly these layouts, by path, opened; None: not there."""

    def publish(
        self, plan: LoadPlan, weights: HostWeights, transform: BlockTransform | None
    ) -> HostWeights:
        """Store what was loaded and return the stored weights, opened, having closed the given
        ones; or, where that fails, the given ones as they are."""
