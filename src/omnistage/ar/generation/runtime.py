"""A generation stage (codec ids → waveform): which scheduler decides, which executor runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.ar.generation.options import GenerationOptions, read_generation_options
from omnistage.ar.generation.scheduler import GenerationScheduler
from omnistage.contracts.errors import UnsupportedCombinationError

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.runtime import Executor


class GenerationRuntime:
    """Named by stages as "omnistage.ar.generation.runtime:GenerationRuntime"."""

    @staticmethod
    def scheduler(stage: ResolvedStage) -> GenerationScheduler:
        """Raises `ConfigurationError` or `UnsupportedCombinationError` for settings that cannot
        be served, before anything is loaded."""
        return GenerationScheduler(_checked(stage))

    @staticmethod
    def executor(stage: ResolvedStage, rank: int, world_size: int) -> Executor:
        from omnistage.ar.generation.executor import GenerationExecutor

        return GenerationExecutor(stage, _checked(stage), rank, world_size)


def _checked(stage: ResolvedStage) -> GenerationOptions:
    ranks = stage.parallel.world_size
    if ranks > 1:
        raise UnsupportedCombinationError(
            f"a generation stage of {ranks} ranks is not there yet; use one device"
        )
    return read_generation_options(stage)
