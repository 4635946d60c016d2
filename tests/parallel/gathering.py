"""The denoising runtime with a denoiser that is collective, as one whose weights are gathered is.

What goes wrong on which rank stands in the prompt: "fail:RANK" raises before the first step,
"break:RANK" inside a step, "die:RANK" kills the process there, "hang:RANK" stops it there.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from typing import Any

from omnistage.config.resolved import DEFAULT_OPERATION_LIMITS_S, ParallelConfig, ResolvedStage
from omnistage.contracts.errors import InvalidRequestError, OutOfMemoryError
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, ExecutionContext, LoadReporter
from omnistage.diffusion.executor import DiffusionExecutor
from omnistage.diffusion.options import read_options
from omnistage.diffusion.request_scheduler import RequestScheduler
from omnistage.diffusion.runtime import DiffusionRuntime, request_scheduler
from omnistage.diffusion.wave_runner import WaveRunner
from omnistage.diffusion.waves import WaveRules
from tests.checkpoints import checkpoint
from tests.diffusion.driver import diffusion_stage

RUNTIME = "tests.parallel.gathering:GatheringRuntime"
LIMITS_S = dict.fromkeys(DEFAULT_OPERATION_LIMITS_S, 4.0)
_FAULT = re.compile(r"(fail|break|die|hang):(\d)")


class GatheringExecutor(DiffusionExecutor):
    """Each forward of the denoiser begins by counting, with all ranks, that each has come to the
    same one."""

    forwards = 0
    faults: dict[str, int]

    def __init__(self, stage: Any, rank: int, world_size: int) -> None:
        """The strategy that gathers weights is not under test: they stay on the device."""
        plain = replace(stage, offload="none")
        super().__init__(plain, read_options(stage.options), rank, world_size)
        self._asked = stage

    def _make_waves(self, runner: Any) -> WaveRunner:
        return WaveRunner(runner, self._groups, WaveRules.of(self._asked))

    def load(self, report: LoadReporter) -> dict[str, Any]:
        description = super().load(report)
        pipeline = self._variants.base
        pipeline.transformer.transformer_blocks[0].register_forward_pre_hook(self._gather)
        encode = pipeline.encode_prompt

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            if self.faults.get("fail") == self._rank:
                raise InvalidRequestError("this rank refuses the prompt")
            return encode(*args, **kwargs)

        pipeline.encode_prompt = encode_prompt
        return description

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        parts = command.data.fields["parts"]
        texts = " ".join(part["fields"]["prompt"] for part in parts)
        self.faults = {kind: int(rank) for kind, rank in _FAULT.findall(texts)}
        return super().execute(command, context)

    def _gather(self, module: Any, args: Any) -> None:
        import torch
        import torch.distributed as dist

        for kind, rank in self.faults.items():
            if rank == self._rank:
                _go_wrong(kind)
        self.forwards += 1
        name = "data" if self._groups.size("data") > 1 else "sequence"
        total = torch.tensor([self.forwards])
        dist.all_reduce(total, group=self._groups.group_of(name))
        assert total.item() == self.forwards * self._groups.size(name)


def _go_wrong(kind: str) -> None:
    if kind == "break":
        raise OutOfMemoryError("no memory inside a step")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)


class GatheringRuntime(DiffusionRuntime):
    @staticmethod
    def scheduler(stage: Any) -> RequestScheduler:
        return request_scheduler(stage, read_options(stage.options))

    @staticmethod
    def executor(stage: Any, rank: int, world_size: int) -> DiffusionExecutor:
        return GatheringExecutor(stage, rank, world_size)


def gathering_stage(**changes: Any) -> ResolvedStage:
    """Two ranks that serve a request each and gather their weights."""
    settings = {
        "parallel": ParallelConfig(data_parallel_size=2),
        "offload": "distributed-layerwise",
        "request_batch_max_wait_ms": 500.0,
        "operation_limits_s": LIMITS_S,
        "devices": ("cpu",) * 2,
        **changes,
    }
    plain = diffusion_stage(checkpoint("flux"), **settings)
    return replace(plain, stage=replace(plain.stage, runtime=RUNTIME))
