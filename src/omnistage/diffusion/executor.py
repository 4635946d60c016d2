"""One rank of a denoising stage: loads the pipeline and carries out commands on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from omnistage.attention.registry import apply_backend, select_backend
from omnistage.contracts.errors import (
    ConfigurationError,
    InternalError,
    InvalidRequestError,
    OutOfMemoryError,
)
from omnistage.contracts.identity import RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, ExecutionContext, LoadReporter
from omnistage.diffusion.arguments import RUNTIME_PARAMETERS
from omnistage.diffusion.components import find_parts
from omnistage.diffusion.failures import classify
from omnistage.diffusion.fast_path import FastPath
from omnistage.diffusion.loading import (
    LoadedStage,
    denoisers_move,
    describe_quantization,
    explained_shortage,
    load_stage,
)
from omnistage.diffusion.options import DiffusionOptions, runs_steps
from omnistage.diffusion.overrides import set_autoencoder_feature
from omnistage.diffusion.request_runner import RequestRunner
from omnistage.diffusion.request_scheduler import GENERATE
from omnistage.diffusion.signature import signature_of
from omnistage.diffusion.step_runner import StepRunner
from omnistage.diffusion.step_setup import make_step_runner
from omnistage.diffusion.variants import PipelineVariants
from omnistage.diffusion.wave_runner import WaveRunner
from omnistage.diffusion.wave_steps import StepShares
from omnistage.diffusion.waves import WaveRules, weights_are_gathered
from omnistage.memory.offload.base import OffloadBackend
from omnistage.memory.offload.execution_device import declare_execution_device
from omnistage.memory.planning.describe import placement_data
from omnistage.parallel.groups import ProcessGroups, open_process_groups
from omnistage.parallel.sequence import share_sequences
from omnistage.parallel.topology import Topology
from omnistage.platforms.registry import platform_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from omnistage.config.resolved import ResolvedStage

Runner = TypeVar("Runner")


class DiffusionExecutor:
    """In request mode nothing of a request outlives its command; in step mode its state lives from
    its encoding to its release."""

    def __init__(
        self, stage: ResolvedStage, options: DiffusionOptions, rank: int, world_size: int
    ) -> None:
        self._topology = Topology.of(stage.parallel)
        assert world_size == self._topology.world_size
        self._rank = rank
        self._rendezvous: str | None = None
        self._groups: ProcessGroups | None = None
        self._waves: WaveRunner | None = None
        self._unshare: Callable[[], None] = lambda: None
        self._stage = stage
        self._options = options
        self._device = stage.devices[rank]
        self._platform = platform_of(self._device)
        self._offload: OffloadBackend | None = None
        self._undeclare: Callable[[], None] = lambda: None
        self._fast_path: FastPath | None = None
        self._variants: PipelineVariants | None = None
        self._requests: RequestRunner | None = None
        self._steps: StepRunner | None = None
        self._step_shares: StepShares | None = None

    def join(self, rendezvous: str) -> None:
        """See `JoinsRanks`."""
        self._rendezvous = rendezvous

    def load(self, report: LoadReporter) -> dict[str, Any]:
        """Build the pipeline by plan. Raises `ConfigurationError` for one that cannot be served
        or a default that it does not take."""
        stage = self._stage
        self._groups = self._open_groups()
        backend = select_backend(self._device, self._options.attention_backend)
        loaded = load_stage(stage, self._device, self._platform, report, self._groups)
        pipeline, self._offload = loaded.pipeline, loaded.offload
        pipeline.set_progress_bar_config(disable=True)
        for denoiser in find_parts(pipeline).denoisers.values():
            apply_backend(denoiser, backend)
        self._share_sequences(pipeline)
        self._check_defaults(pipeline)
        self._set_autoencoder_features(pipeline)
        self._variants = PipelineVariants(pipeline, self._options)
        with explained_shortage(self._device, loaded.placement):
            fast_path = self._make_ready(loaded)
            fast_path.warm_up(self._steps, self._requests, report)
        return {
            "pipeline_class": type(pipeline).__name__,
            "device": self._device,
            "dtype": loaded.plan.dtype,
            "attention_backend": backend.name,
            "weight_bytes": loaded.plan.total_bytes,
            "placement": placement_data(loaded.placement),
            "offload": self._offload.describe(),
            "quantization": describe_quantization(pipeline),
            "execution": "steps" if self._steps is not None else "requests",
            "denoiser": fast_path.describe(),
            "components": {
                name: type(part).__name__
                for name, part in pipeline.components.items()
                if part is not None
            },
        }

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        """What the commands' results hold is said by their runners."""
        if self._fast_path is not None:
            self._fast_path.follow(context)
        for steps in (self._steps, self._step_shares):
            if steps is not None and steps.knows(command):
                return self._guarded(functools.partial(steps.execute, command, context))
        if command.name == GENERATE:
            runner = self._loaded(self._requests) if self._waves is None else self._waves
            return runner.execute(command, context)
        raise InternalError(f"a diffusion executor cannot {command.name!r}")

    def release(self, key: RequestKey) -> None:
        if self._steps is not None:
            self._steps.release(key)

    def control(self, method: str, arguments: dict[str, Any]) -> Any:
        raise InvalidRequestError(f"a diffusion stage has no control call {method!r}")

    def close(self) -> None:
        """Whatever of it fails, all else is closed: page locks and groups outlive no stage."""
        with ExitStack() as closing:
            closing.callback(self._platform.empty_cache, self._device)
            if self._groups is not None:
                closing.callback(self._groups.close)
            closing.callback(self._unshare)
            if self._offload is not None:
                closing.callback(self._offload.disable)
            closing.callback(self._undeclare)
            for part in (self._fast_path, self._steps, self._step_shares):
                if part is not None:
                    closing.callback(part.close)
            self._variants = self._requests = self._steps = self._fast_path = self._waves = None
            self._step_shares = None

    def _make_ready(self, loaded: LoadedStage) -> FastPath:
        """Layers are fused where the loader left their weights; blocks are compiled by the first
        call, with the offload's hooks outside."""
        pipeline = loaded.pipeline
        eager = self._stage.enforce_eager or self._topology.size("sequence") > 1
        fast_path = self._fast_path = FastPath(
            replace(self._stage, enforce_eager=eager),
            self._options,
            self._platform,
            self._device,
            weights_move=denoisers_move(loaded.placement, find_parts(pipeline).denoisers),
        )
        fast_path.install(pipeline)
        loaded.offload.enable(pipeline)
        if loaded.placement.strategy != "none":
            self._undeclare = declare_execution_device(pipeline, self._device)
        self._make_runners(pipeline)
        return fast_path

    def _make_runners(self, pipeline: DiffusionPipeline) -> None:
        assert self._variants is not None
        assert self._fast_path is not None
        stage = self._stage
        if runs_steps(stage):
            self._steps = make_step_runner(
                stage, self._options, self._variants, self._fast_path, self._platform, self._device
            )
            self._step_shares = self._make_step_shares(self._steps)
        else:
            self._requests = RequestRunner(
                self._variants,
                self._options,
                stage.default_sampling_params,
                self._platform,
                self._device,
            )
            self._waves = self._make_waves(self._requests)

    def _open_groups(self) -> ProcessGroups:
        """Collectives may take as long as the longest operation: another rank may compile."""
        return open_process_groups(
            self._topology,
            self._rank,
            device=self._device,
            rendezvous=self._rendezvous,
            timeout_s=max(self._stage.operation_limits_s.values()),
            join_timeout_s=self._stage.init_timeout_s,
        )

    def _share_sequences(self, pipeline: DiffusionPipeline) -> None:
        assert self._groups is not None
        denoisers = find_parts(pipeline).denoisers
        self._unshare = share_sequences(denoisers, self._groups)

    def _make_waves(self, runner: RequestRunner) -> WaveRunner | None:
        assert self._groups is not None
        if self._topology.world_size == 1:
            return None
        return WaveRunner(runner, self._groups, WaveRules.of(self._stage))

    def _make_step_shares(self, runner: StepRunner) -> StepShares | None:
        assert self._groups is not None
        assert self._fast_path is not None
        assert self._fast_path.family is not None
        if self._topology.world_size == 1:
            return None
        return StepShares(
            runner,
            self._groups,
            WaveRules.of(self._stage),
            self._fast_path.family.module,
            gathered=weights_are_gathered(self._stage),
            free_memory=lambda: self._platform.empty_cache(self._device),
        )

    def _guarded(self, run: Callable[[], StageData]) -> StageData:
        """Errors as ours, holding no tensors; memory back to the device when it ran short."""
        try:
            return run()
        except Exception as error:
            failure = classify(error, None, 0)
        if isinstance(failure, OutOfMemoryError):
            self._platform.empty_cache(self._device)
        raise failure

    def _loaded(self, runner: Runner | None) -> Runner:
        if runner is None:
            raise InternalError("the diffusion stage has not loaded its model, or is closed")
        return runner

    def _set_autoencoder_features(self, pipeline: DiffusionPipeline) -> None:
        try:
            for feature in ("tiling", "slicing"):
                wanted = getattr(self._options, f"vae_{feature}")
                if wanted is not None:
                    set_autoencoder_feature(pipeline, feature, wanted)
        except InvalidRequestError as error:
            raise ConfigurationError(error.message) from error

    def _check_defaults(self, pipeline: DiffusionPipeline) -> None:
        """The stage's default sampling parameters must mean something to the loaded pipeline."""
        signature = signature_of(type(pipeline))
        defaults = dict(self._stage.default_sampling_params)
        extra = defaults.pop("extra_args", {})
        names = [name for name in defaults if name not in RUNTIME_PARAMETERS]
        unknown = [name for name in names if signature.spelling(name) is None]
        unknown += [name for name in extra if name not in signature]
        if unknown:
            refused = signature.refuse(unknown[0])
            raise ConfigurationError(f"default sampling parameters: {refused.message}")
