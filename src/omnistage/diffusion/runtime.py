"""The denoising runtime as a stage: which scheduler decides, which executor runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.contracts.runtime import Scheduler
from omnistage.diffusion.executor import DiffusionExecutor
from omnistage.diffusion.options import DiffusionOptions, read_options
from omnistage.diffusion.scheduler import request_scheduler
from omnistage.parallel.groups import open_process_groups
from omnistage.parallel.topology import Topology

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage

SCHEDULERS: dict[str, Callable[[ResolvedStage, DiffusionOptions], Scheduler]] = {
    "request": request_scheduler,
}
"""By `execution_mode`. All of them share the executor and the output stream."""


class DiffusionRuntime:
    """Named by stages as "omnistage.diffusion.runtime:DiffusionRuntime"."""

    @staticmethod
    def scheduler(stage: ResolvedStage) -> Scheduler:
        """Raises `ConfigurationError` or `UnsupportedCombinationError` for options that this
        version cannot serve."""
        options = read_options(stage.options)
        _check_ranks(stage)
        make = SCHEDULERS.get(options.execution_mode)
        if make is None:
            raise ConfigurationError(
                f"execution_mode {options.execution_mode!r} is not there; "
                f"allowed: {', '.join(SCHEDULERS)}"
            )
        return make(stage, options)

    @staticmethod
    def executor(stage: ResolvedStage, rank: int, world_size: int) -> DiffusionExecutor:
        return DiffusionExecutor(stage, read_options(stage.options), rank, world_size)


def _check_ranks(stage: ResolvedStage) -> None:
    open_process_groups(Topology.of(stage.parallel), rank=0).close()
    ranks = stage.parallel.world_size
    if ranks > 1:
        raise UnsupportedCombinationError(
            f"a diffusion stage of {ranks} ranks is not there yet; use one device"
        )
