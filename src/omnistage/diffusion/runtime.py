"""The denoising runtime as a stage: which scheduler decides, which executor runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.contracts.runtime import Scheduler
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.diffusion.batching import call_key, shape_key
from omnistage.diffusion.executor import DiffusionExecutor
from omnistage.diffusion.offloading import check_offload
from omnistage.diffusion.options import DiffusionOptions, read_options, runs_steps
from omnistage.diffusion.queue import WaitingQueue
from omnistage.diffusion.request_scheduler import RequestScheduler
from omnistage.diffusion.step_lanes import LaneScheduler
from omnistage.diffusion.step_scheduler import StepScheduler
from omnistage.diffusion.waves import WaveRules, ranks_of_shares, require_steps
from omnistage.parallel.groups import refuse_missing
from omnistage.parallel.topology import Topology
from omnistage.quantization.config import resolve_quantization

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage


_STEP_MODE_ONLY = ("max_batch_shapes", "max_overtakes", "guidance_in_one_batch")


class DiffusionRuntime:
    """Named by stages as "omnistage.diffusion.runtime:DiffusionRuntime"."""

    @staticmethod
    def scheduler(stage: ResolvedStage) -> Scheduler:
        """Raises `ConfigurationError` or `UnsupportedCombinationError` for settings that cannot
        be served, before anything is loaded."""
        options = read_options(stage.options)
        _check_ranks(stage)
        check_mode(stage, options)
        check_offload(stage)
        resolve_quantization(stage.quantization_config)
        return (
            step_scheduler(stage, options)
            if runs_steps(stage)
            else request_scheduler(stage, options)
        )

    @staticmethod
    def executor(stage: ResolvedStage, rank: int, world_size: int) -> DiffusionExecutor:
        return DiffusionExecutor(stage, read_options(stage.options), rank, world_size)


def check_mode(stage: ResolvedStage, options: DiffusionOptions) -> None:
    """Raises `UnsupportedCombinationError` for flags of which one would have no effect."""
    wait_ms = stage.request_batch_max_wait_ms
    model = stage.model_path.rpartition("/")[2]
    if runs_steps(stage):
        if options.step_family is None:
            streams = stage.diffusion_streaming_output
            flag = "diffusion_streaming_output" if streams else "step_execution"
            raise UnsupportedCombinationError(
                f"{flag}: the pipeline of {model} has no step mode (no prepare_encode, "
                "denoise_step, step_scheduler and post_decode); leave the flag out",
                param=flag,
            )
        if wait_ms:
            raise UnsupportedCombinationError(
                f"request_batch_max_wait_ms={wait_ms:g} has no effect in step mode, where requests "
                "join between steps; leave it out",
                param="request_batch_max_wait_ms",
            )
        if stage.diffusion_streaming_output and stage.output_window == 1:
            raise UnsupportedCombinationError(
                "output_window=1 leaves no place for previews (diffusion_streaming_output) beside "
                "the result; use at least 2",
                param="output_window",
            )
        return
    for name in _STEP_MODE_ONLY:
        if name in stage.options:
            raise UnsupportedCombinationError(
                f"option {name} has no effect in request mode; set step_execution or leave it out",
                param="options",
            )
    if stage.max_num_seqs > 1 and not options.supports_request_batch:
        raise UnsupportedCombinationError(
            f"max_num_seqs={stage.max_num_seqs}: the pipeline of {model} does not declare "
            "request batches (supports_request_batch); use max_num_seqs=1",
            param="max_num_seqs",
        )
    if wait_ms and stage.max_num_seqs * stage.parallel.data_parallel_size == 1:
        raise UnsupportedCombinationError(
            f"request_batch_max_wait_ms={wait_ms:g} has no effect with max_num_seqs=1: there is "
            "no batch to wait for; raise max_num_seqs or leave it out",
            param="request_batch_max_wait_ms",
        )


def request_scheduler(stage: ResolvedStage, options: DiffusionOptions) -> RequestScheduler:
    rules = WaveRules.of(stage)

    def check(params: OmniDiffusionSamplingParams) -> None:
        refuse_previews(params)
        if rules.synchronized:
            require_steps(params)

    queue = WaitingQueue(
        capacity=options.max_queued_requests,
        defaults=stage.default_sampling_params,
        batch_key=call_key,
        clock=time.monotonic,
        check=check,
    )
    return RequestScheduler(
        queue,
        max_num_seqs=stage.max_num_seqs,
        max_wait_s=stage.request_batch_max_wait_ms / 1000,
        rules=rules,
    )


def step_scheduler(
    stage: ResolvedStage, options: DiffusionOptions
) -> StepScheduler | LaneScheduler:
    queue = WaitingQueue(
        capacity=options.max_queued_requests,
        defaults=stage.default_sampling_params,
        batch_key=shape_key,
        clock=time.monotonic,
        check=allow_previews if stage.diffusion_streaming_output else refuse_previews,
    )
    ranks = ranks_of_shares(stage)
    lanes = [
        StepScheduler(
            queue,
            max_num_seqs=stage.max_num_seqs,
            max_shapes=options.max_batch_shapes,
            max_overtakes=options.max_overtakes,
        )
        for _ in ranks
    ]
    if stage.parallel.world_size == 1:
        return lanes[0]
    return LaneScheduler(
        queue,
        lanes,
        ranks,
        one_kind=WaveRules.of(stage).synchronized,
        limits_s=stage.operation_limits_s,
    )


def allow_previews(params: OmniDiffusionSamplingParams) -> None:
    """A stage with `diffusion_streaming_output` refuses nothing."""


def refuse_previews(params: OmniDiffusionSamplingParams) -> None:
    if params.partial_images:
        raise UnsupportedCombinationError(
            f"partial_images={params.partial_images}: this stage shows no intermediate pictures; "
            "start the server with --diffusion-streaming-output, or ask for 0",
            param="partial_images",
        )


def _check_ranks(stage: ResolvedStage) -> None:
    topology = Topology.of(stage.parallel)
    refuse_missing(topology)
    ranks = topology.size("rank")
    if ranks > 1:
        raise UnsupportedCombinationError(
            f"--rank-parallel-size {ranks}: a diffusion stage divides no work by itself; use "
            "--data-parallel-size or --sequence-parallel-size"
        )
