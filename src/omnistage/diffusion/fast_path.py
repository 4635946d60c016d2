"""What makes a family's denoiser fast on a GPU, put on at load and taken off at close.

Nothing of it is on under `enforce_eager` or for a pipeline without a family; on a CPU step mode
decodes with another layout of its weights, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omnistage.contracts.runtime import ExecutionContext, LoadReporter
from omnistage.diffusion.decoder_layout import channels_last
from omnistage.diffusion.denoiser import Denoiser, DenoiserSettings
from omnistage.diffusion.family import StepFamily
from omnistage.diffusion.imports import load_family
from omnistage.diffusion.options import DiffusionOptions, runs_steps
from omnistage.diffusion.warm_up import warm_up_call, warm_up_steps

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from omnistage.config.resolved import ResolvedStage
    from omnistage.diffusion.request_runner import RequestRunner
    from omnistage.diffusion.step_runner import StepRunner
    from omnistage.platforms.base import Platform


class FastPath:
    """The family of the loaded pipeline, its denoiser, and how to undo what they changed."""

    def __init__(
        self,
        stage: ResolvedStage,
        options: DiffusionOptions,
        platform: Platform,
        device: str,
        *,
        weights_move: bool = False,
    ) -> None:
        """With `weights_move` the denoiser's weights are not all on the device, and not always."""
        self._weights_move = weights_move
        self._stage = stage
        self._options = options
        self._platform = platform
        self._device = device
        self._on_gpu = device.partition(":")[0] != "cpu"
        self._undo: list[Callable[[], None]] = []
        self._denoiser: Denoiser | None = None
        self.family: StepFamily | None = None

    def install(self, pipeline: DiffusionPipeline) -> None:
        """Raises `ConfigurationError` for a family or a denoiser that cannot be used."""
        fast = self._on_gpu and not self._stage.enforce_eager
        if self._options.step_family is None or not (runs_steps(self._stage) or fast):
            return
        self.family = load_family(self._options.step_family, pipeline)
        self._undo += self.family.install(fuse=fast)
        if not self._on_gpu:
            self._undo.append(channels_last(pipeline))
        settings = DenoiserSettings(
            graphs=self._options.graph_max_tokens > 0 and not self._weights_move,
            weights_move=self._weights_move,
            graph_max_tokens=max(1, self._options.graph_max_tokens),
            max_graphs=self._options.max_graphs,
            coordinate_descent=self._options.coordinate_descent,
        )
        self._denoiser = Denoiser(
            self.family.module, self._platform, self._device, eager=not fast, settings=settings
        )
        self._denoiser.install()
        self.family.denoiser = self._denoiser
        self.family.in_one_batch = self._options.guidance_in_one_batch

    def warm_up(
        self, steps: StepRunner | None, requests: RequestRunner | None, report: LoadReporter
    ) -> None:
        """Run short requests of each of `warmup_sizes` through the stage's runner, which is one of
        the two, so that nobody waits for a compiler."""
        sizes = self._options.warmup_shapes
        if self._denoiser is None or not self._on_gpu:
            return
        together = self._options.supports_request_batch and self._stage.max_num_seqs > 1
        pictured = self._options.image_input == "required"
        counts = (1, 2) if steps is not None or together else (1,)
        for number, (height, width) in enumerate(sizes):
            started, before = time.monotonic(), self._denoiser.compilations()
            report(f"compiling for {width}x{height}", number / len(sizes))
            for count in counts:
                if steps is not None:
                    warm_up_steps(steps, height, width, with_picture=pictured, count=count)
                elif requests is not None:
                    warm_up_call(requests, height, width, with_picture=pictured, count=count)
            compiled = self._denoiser.compilations() - before
            seconds = time.monotonic() - started
            report(f"compiled {compiled} block variants in {seconds:.0f} s", number / len(sizes))

    def follow(self, context: ExecutionContext) -> None:
        """What a command of `context` has to compile is no step that hangs: it has the limit of
        operation "compile", for the rest of the command or until the next step of a pipeline."""
        if self._denoiser is not None:
            self._denoiser.on_compile = lambda: context.operation("compile")

    def describe(self) -> dict[str, Any]:
        return {"eager": True} if self._denoiser is None else self._denoiser.describe()

    def close(self) -> None:
        if self._denoiser is not None:
            self._denoiser.close()
        while self._undo:
            self._undo.pop()()
        self.family = self._denoiser = None
