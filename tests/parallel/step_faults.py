"""Step mode on a late device, with faults: "KIND:RANK" in a prompt goes wrong on that rank while
the request is held there.

"fail" raises between passes of the denoiser, "break" inside one, "die" kills the process there,
"large" raises in a pass of several rows; "all" means every rank.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from typing import Any

from omnistage.config.resolved import DEFAULT_OPERATION_LIMITS_S, ParallelConfig, ResolvedStage
from omnistage.contracts.errors import OutOfMemoryError
from omnistage.contracts.runtime import LoadReporter
from omnistage.diffusion.options import read_options
from omnistage.diffusion.runtime import DiffusionRuntime, step_scheduler
from tests.memory.offload.late_runtime import LateExecutor
from tests.parallel.stepping import step_stage

RUNTIME = "tests.parallel.step_faults:FaultyRuntime"
LIMITS_S = dict.fromkeys(DEFAULT_OPERATION_LIMITS_S, 5.0)
_FAULT = re.compile(r"(fail|break|die|large):(\d|all)")


class FaultyExecutor(LateExecutor):
    def load(self, report: LoadReporter) -> dict[str, Any]:
        described = super().load(report)
        block = self._variants.base.transformer.transformer_blocks[0]
        block.register_forward_pre_hook(self._inside, with_kwargs=True)
        family = self._fast_path.family
        guide = family.guide

        def faulty_guide(*args: Any) -> Any:
            self._go_wrong("fail")
            return guide(*args)

        family.guide = faulty_guide
        return described

    def _inside(self, module: Any, args: Any, inputs: dict[str, Any]) -> None:
        large = ("large",) if len(inputs["hidden_states"]) > 1 else ()
        self._go_wrong("break", "die", *large)

    def _go_wrong(self, *kinds: str) -> None:
        for state in self._steps._states.values():
            for kind, rank in _FAULT.findall(state.arguments["prompt"]):
                if kind not in kinds or rank not in ("all", str(self._rank)):
                    continue
                if kind == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OutOfMemoryError(f"{kind} on rank {self._rank}")


class FaultyRuntime(DiffusionRuntime):
    @staticmethod
    def scheduler(stage: Any) -> Any:
        return step_scheduler(stage, read_options(stage.options))

    @staticmethod
    def executor(stage: Any, rank: int, world_size: int) -> FaultyExecutor:
        return FaultyExecutor(stage, rank, world_size)


def faulty_stage(parallel: ParallelConfig, **changes: Any) -> ResolvedStage:
    plain = step_stage("flux", parallel, **{"operation_limits_s": LIMITS_S, **changes})
    return replace(plain, stage=replace(plain.stage, runtime=RUNTIME))
