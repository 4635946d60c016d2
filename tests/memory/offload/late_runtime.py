"""The denoising runtime on a late device: for stages whose ranks are processes of their own."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from omnistage.config.resolved import DEFAULT_OPERATION_LIMITS_S, ResolvedStage
from omnistage.contracts.runtime import LoadReporter
from omnistage.diffusion.executor import DiffusionExecutor
from omnistage.diffusion.options import read_options
from omnistage.diffusion.request_scheduler import RequestScheduler
from omnistage.diffusion.runtime import DiffusionRuntime, request_scheduler
from tests.checkpoints import checkpoint
from tests.diffusion.driver import diffusion_stage
from tests.memory.offload.fake_device import LatePlatform, late_device
from tests.memory.offload.ranks import counted_memory

RUNTIME = "tests.memory.offload.late_runtime:LateRuntime"
LIMIT_S = 5.0


class LateExecutor(DiffusionExecutor):
    """Says how much private host memory it took, and page-locked. A prompt "die:1" kills rank 1 in
    the middle of a step."""

    def __init__(self, stage: Any, rank: int, world_size: int) -> None:
        self._late = ExitStack()
        self._private_bytes = self._late.enter_context(counted_memory())
        self.late: LatePlatform = self._late.enter_context(late_device())
        super().__init__(stage, read_options(stage.options), rank, world_size)

    def load(self, report: LoadReporter) -> dict[str, Any]:
        described = super().load(report)
        denoiser = self._variants.base.transformer
        denoiser.transformer_blocks[0].register_forward_pre_hook(self._die)
        return described | {
            "private_bytes": sum(self._private_bytes),
            "locked_bytes": self.late.locked_bytes,
        }

    def execute(self, command: Any, context: Any) -> Any:
        self._prompts = str(command.data.fields)
        return super().execute(command, context)

    def close(self) -> None:
        super().close()
        assert self.late.locked_bytes == 0
        self._late.close()

    def _die(self, module: Any, args: Any) -> None:
        if f"die:{self._rank}" in self._prompts:
            os.kill(os.getpid(), signal.SIGKILL)


class LateRuntime(DiffusionRuntime):
    @staticmethod
    def scheduler(stage: Any) -> RequestScheduler:
        return request_scheduler(stage, read_options(stage.options))

    @staticmethod
    def executor(stage: Any, rank: int, world_size: int) -> DiffusionExecutor:
        return LateExecutor(stage, rank, world_size)


def late_stage(family: str, **changes: Any) -> ResolvedStage:
    """A stage of `family` with distributed layerwise offload."""
    limits_s = dict.fromkeys(("step", "forward", "encode", "decode", "compile", "control"), LIMIT_S)
    settings = {
        "offload": "distributed-layerwise",
        "request_batch_max_wait_ms": 5000.0,  # A full wave waits for nothing.
        "operation_limits_s": {**DEFAULT_OPERATION_LIMITS_S, **limits_s},
        **changes,
    }
    settings["devices"] = ("cpu",) * settings["parallel"].world_size
    plain = diffusion_stage(checkpoint(family), **settings)
    return replace(plain, stage=replace(plain.stage, runtime=RUNTIME))
