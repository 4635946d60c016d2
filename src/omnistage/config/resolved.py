"""The configuration after resolution: complete, validated, made of plain values.

`OmniConfig` crosses process boundaries as it is; nothing downstream adds a default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from omnistage.config.pipeline import PipelineConfig, StageConfig

INLINE_PROCESS = "inline"
"""As a stage's `process`: the replica runs in the engine's own process."""

DEFAULT_OPERATION_LIMITS_S = {
    "compile": 900.0,
    "forward": 600.0,
    "step": 120.0,
    "encode": 120.0,
    "decode": 120.0,
    "control": 60.0,
    "output": 30.0,
}
"""Longest time that one operation of a kind may take before its replica counts as hung. Loading has
`init_timeout_s`."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel dimensions of one replica; their product is its number of ranks.

    Expert, VAE patch and HSDP (weights sharded, shards replicated) sizes group the same ranks once
    more; HSDP alone makes ranks of its own. `hsdp_shard_size` -1 takes all ranks.
    """

    tensor_parallel_size: int = 1
    sequence_parallel_size: int = 1
    ring_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    cfg_parallel_size: int = 1
    rank_parallel_size: int = 1
    """Ranks that divide the work among themselves as their runtime sees fit."""
    expert_parallel_size: int = 1
    vae_patch_parallel_size: int = 1
    use_hsdp: bool = False
    hsdp_shard_size: int = -1
    hsdp_replicate_size: int = 1

    @property
    def world_size(self) -> int:
        ranks = math.prod(
            (
                self.tensor_parallel_size,
                self.sequence_parallel_size,
                self.ring_parallel_size,
                self.data_parallel_size,
                self.pipeline_parallel_size,
                self.cfg_parallel_size,
                self.rank_parallel_size,
            )
        )
        if ranks == 1 and self.use_hsdp:
            return max(1, self.hsdp_shard_size * self.hsdp_replicate_size)
        return ranks


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """A dead replica restarts after `backoff_s`, doubled each time up to `max_backoff_s`; more than
    `max_restarts` deaths within `window_s` and it stays down."""

    max_restarts: int = 5
    window_s: float = 300.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class ResolvedStage:
    """All that a replica's process needs to know, besides its replica id.

    `process` groups stages: equal names share one process per replica index, "inline" is the
    engine's own. `devices` has one entry a rank ("cpu", "cuda:0"), for each replica in turn or once
    for all of them: `for_replica` picks. `output_window` is how many outputs of one child may be
    unacknowledged. `memory_budget_gib` bounds what the weights of a
    rank take; None means no bound. `step_execution`, `request_batch_max_wait_ms` and
    `diffusion_streaming_output` are for diffusion stages.

    Of token stages: `max_num_batched_tokens` bounds the tokens of one step, `max_model_len` a
    sequence (None: the model's own bound). Keys and values get `kv_cache_gib`; None: what is left
    of `gpu_memory_utilization` (a fraction of the device's memory) on a GPU, 1 GiB on a CPU.
    `block_size` is in tokens, None chosen by device. `async_chunk` false: a stage waits for all of
    its input.
    """

    stage: StageConfig
    model_path: str
    process: str
    num_replicas: int = 1
    devices: tuple[str, ...] = ("cpu",)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dtype: str = "auto"
    max_num_seqs: int = 1
    output_window: int = 16
    connector: str = "auto"
    shm_threshold_bytes: int = 65_536
    memory_budget_gib: float | None = None
    memory: str = "auto"
    offload: str = "auto"
    dlo_use_allgather: bool = True
    dlo_resident_layers: int | None = None
    dlo_runtime_cache: str = "auto"
    dlo_runtime_cache_pin_limit_gib: float | None = None
    weight_cache_dir: str | None = None
    weight_cache_limit_gib: float | None = None
    quantization_config: str | dict[str, Any] | None = None
    enforce_eager: bool = False
    step_execution: bool = False
    request_batch_max_wait_ms: float = 0.0
    diffusion_streaming_output: bool = False
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_chunk: bool = True
    async_scheduling: bool = True
    fuse_layers: bool = True
    init_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 30.0
    operation_limits_s: dict[str, float] = field(
        default_factory=lambda: dict(DEFAULT_OPERATION_LIMITS_S)
    )
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def stage_id(self) -> int:
        return self.stage.stage_id

    @property
    def name(self) -> str:
        return self.stage.name

    def for_replica(self, replica_id: int) -> ResolvedStage:
        """The same stage with just the devices of one replica, one a rank."""
        ranks = self.parallel.world_size
        first = replica_id * ranks if len(self.devices) > ranks else 0
        return replace(self, devices=self.devices[first : first + ranks])


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Bounds of the engine. `max_inflight_requests` is the admission bound: one more gets 429.
    `slow_client_timeout_s` is how long a client may leave its full stream unread."""

    max_inflight_requests: int = 256
    request_timeout_s: float = 600.0
    slow_client_timeout_s: float = 30.0
    abort_timeout_s: float = 30.0
    shutdown_timeout_s: float = 10.0
    stream_buffer: int = 64


@dataclass(frozen=True, kw_only=True)
class OmniConfig:
    """The resolved deployment of one model. `model` is what the user named, `model_path` where it
    lies; `lb_policy` is "least-queue-length", "round-robin" or "random"."""

    model: str
    model_path: str
    served_model_name: str
    pipeline: PipelineConfig
    stages: tuple[ResolvedStage, ...]
    limits: EngineLimits = field(default_factory=EngineLimits)
    lb_policy: str = "least-queue-length"
    log_level: str = "info"
    log_json: bool = False
