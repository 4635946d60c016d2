"""The token runtime as a stage: which scheduler decides, which executor runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.ar.options import TokenOptions, read_token_options
from omnistage.ar.scheduler import TokenScheduler
from omnistage.contracts.errors import UnsupportedCombinationError

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.runtime import Executor


class TokenRuntime:
    """Named by stages as "omnistage.ar.runtime:TokenRuntime"."""

    @staticmethod
    def scheduler(stage: ResolvedStage) -> TokenScheduler:
        """Raises `ConfigurationError` or `UnsupportedCombinationError` for settings that cannot
        be served, before anything is loaded."""
        return TokenScheduler(_checked(stage))

    @staticmethod
    def executor(stage: ResolvedStage, rank: int, world_size: int) -> Executor:
        from omnistage.ar.executor import TokenExecutor

        _checked(stage)
        return TokenExecutor(stage, rank, world_size)


def _checked(stage: ResolvedStage) -> TokenOptions:
    ranks = stage.parallel.world_size
    if ranks > 1:
        raise UnsupportedCombinationError(
            f"a token stage of {ranks} ranks is not there yet; use one device"
        )
    return read_token_options(stage)
