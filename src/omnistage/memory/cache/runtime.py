"""The cache as loading uses it: none of its errors stops a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.cache.errors import CacheError
from omnistage.memory.cache.identity import (
    RankShare,
    ingredients_of,
    input_key,
    libraries,
    summary,
)
from omnistage.memory.cache.location import weight_cache_folder
from omnistage.memory.cache.store import WAIT_S, WeightStore
from omnistage.memory.cache.writer import EntryFacts
from omnistage.memory.host.layout import BlockLayout
from omnistage.memory.host.seams import BlockTransform
from omnistage.memory.offload.host import HostBlock, HostWeights
from omnistage.memory.plan import gib
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    from omnistage.memory.plan import LoadPlan

logger = get_logger(__name__)


class RuntimeCache:
    """A `WeightCache` for one rank. A component for which it failed once is not tried again."""

    def __init__(self, store: WeightStore, share: RankShare | None = None) -> None:
        self.store = store
        self.share = share or RankShare()
        self._given_up: set[str] = set()

    @classmethod
    def at(
        cls,
        folder: str | None = None,
        *,
        limit_gib: float | None = None,
        share: RankShare | None = None,
        wait_s: float = WAIT_S,
    ) -> RuntimeCache:
        """By the settings `weight_cache_dir` and `weight_cache_limit_gib`. Touches no file."""
        limit_bytes = None if limit_gib is None else int(limit_gib * 2**30)
        path: Path = weight_cache_folder(folder)
        return cls(WeightStore(path, limit_bytes=limit_bytes, wait_s=wait_s), share)

    def lookup(
        self, plan: LoadPlan, layouts: Mapping[str, BlockLayout], transform: BlockTransform | None
    ) -> HostWeights | None:
        try:
            key = input_key(self._ingredients(plan, layouts, transform))
            weights = self.store.open(key)
        except (CacheError, CheckpointError, OSError) as error:
            self._given_up.add(plan.component)
            _warn(plan, "not read", error)
            return None
        if weights is None:
            return None
        if weights.layouts != tuple(layouts.values()):
            weights.close()
            _warn(plan, "not read", "its entry has another layout")
            return None
        logger.info(
            "%s: %d blocks come from the weight cache, entry %s",
            plan.component,
            len(weights.blocks),
            weights.entry.folder.name[:12],
        )
        return weights

    def publish(
        self, plan: LoadPlan, weights: HostWeights, transform: BlockTransform | None
    ) -> HostWeights:
        if plan.component in self._given_up:
            return weights
        layouts = {path: _layout(block) for path, block in weights.blocks.items()}
        try:
            ingredients = self._ingredients(plan, layouts, transform)
            key = input_key(ingredients)
            facts = EntryFacts(
                component=plan.component,
                component_class=f"{plan.cls.__module__}.{plan.cls.__qualname__}",
                first_key=key,
                libraries=libraries(plan),
            )
            stored = self.store.publish(
                key, list(layouts.values()), weights.blocks.values(), facts, summary(ingredients)
            )
        except (CacheError, CheckpointError, OSError) as error:
            _warn(plan, "not written", error)
            return weights
        logger.info(
            "%s: %s in the weight cache, entry %s",
            plan.component,
            gib(stored.entry.manifest.nbytes),
            stored.entry.folder.name[:12],
        )
        weights.close()
        return stored

    def _ingredients(
        self, plan: LoadPlan, layouts: Mapping[str, BlockLayout], transform: BlockTransform | None
    ) -> dict[str, object]:
        key = transform.key if transform is not None else None
        return ingredients_of(plan, layouts.values(), key, self.share)


def _layout(block: HostBlock) -> BlockLayout:
    return BlockLayout(path=block.path, places=block.places, nbytes=block.nbytes)


def _warn(plan: LoadPlan, what: str, why: object) -> None:
    logger.warning(
        "%s: the weight cache is %s (%s); its weights are loaded as without it",
        plan.component,
        what,
        why,
    )
