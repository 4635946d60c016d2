"""Every key that a person may write, with its type and its meaning. One table a level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from omnistage.config.pipeline import ExecutionType
from omnistage.config.resolved import DEFAULT_OPERATION_LIMITS_S

SCHEMA_VERSION = 1

WEEK_S = 604_800.0

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=WEEK_S)]
"""Every wait has a deadline: at most a week."""
Milliseconds = Annotated[float, Meta(ge=0, le=60_000)]
Gibibytes = Annotated[float, Meta(gt=0, le=1e6)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]
Quantization = str | dict[str, Any] | None
ProcessName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key. `attribute` is its name in the resolved configuration where that differs; `nested`
    are the keys of a mapping; `flag` says whether the command line offers it by this name."""

    type: Any
    meaning: str
    attribute: str | None = None
    nested: dict[str, Key] | None = None
    flag: bool = True


RESTART_KEYS = {
    "max_restarts": Key(type=NonNegative, meaning="deaths within the window before it stays down"),
    "window_s": Key(type=Seconds, meaning="length of that window"),
    "backoff_s": Key(type=Seconds, meaning="wait before the first restart, doubled each time"),
    "max_backoff_s": Key(type=Seconds, meaning="longest wait before a restart"),
}

OPERATION_LIMIT_KEYS = {
    kind: Key(type=Seconds, meaning=f"seconds one {kind!r} operation may take")
    for kind in DEFAULT_OPERATION_LIMITS_S
}

STAGE_KEYS = {
    "device": Key(
        type=Literal["auto", "cpu", "cuda"],
        meaning="kind of device; auto takes a GPU where there is one",
        flag=False,
    ),
    "devices": Key(
        type=str | list[str | int],
        meaning="device of each rank, replica by replica: [cuda:0, cuda:1] or one replica's worth",
    ),
    "num_replicas": Key(type=Count, meaning="copies of the stage"),
    "process": Key(
        type=ProcessName,
        meaning="inline (the engine's own), separate (one a stage), or a name that stages share",
    ),
    "dtype": Key(
        type=Literal["auto", "float32", "bfloat16", "float16"],
        meaning="dtype of the weights; auto: float32 on a CPU, the stored one on a GPU",
    ),
    "max_num_seqs": Key(type=Count, meaning="requests that one replica runs at a time"),
    "output_window": Key(type=Count, meaning="unacknowledged outputs one request may have"),
    "connector": Key(
        type=Literal["auto", "inline", "shm"],
        meaning="how tensors travel: in the message, by shared memory, or as fits (auto)",
    ),
    "shm_threshold_bytes": Key(
        type=NonNegative, meaning="tensors of this size and more go through shared memory"
    ),
    "memory_budget_gib": Key(
        type=Gibibytes | None,
        meaning="most device memory (GiB); diffusion on a GPU: that a rank may have allocated in "
        "all, null: what is free; else: of its weights, null: no bound",
    ),
    "memory": Key(
        type=Literal["auto", "speed", "balanced", "minimal"],
        meaning="diffusion: how much device memory the planner uses",
    ),
    "offload": Key(
        type=Literal["auto", "none", "model", "layerwise", "distributed-layerwise"],
        meaning="diffusion: who moves weights between host and device; auto: the planner decides",
    ),
    "enable_cpu_offload": Key(type=bool, meaning="diffusion: the same as offload model"),
    "enable_layerwise_offload": Key(type=bool, meaning="diffusion: the same as offload layerwise"),
    "enable_distributed_layerwise_offload": Key(
        type=bool, meaning="diffusion: the same as offload distributed-layerwise"
    ),
    "dlo_use_allgather": Key(
        type=bool,
        meaning="distributed-layerwise: each rank keeps a share of the weights, gathered for use",
    ),
    "dlo_resident_layers": Key(
        type=NonNegative | None,
        meaning="layerwise: leading blocks that stay on the device; null: as many as fit, spread",
    ),
    "dlo_runtime_cache": Key(
        type=Literal["auto", "on", "off"],
        meaning="layerwise: weights by a shared file of their final form; auto: where the "
        "checkpoint's own files cannot be mapped",
    ),
    "dlo_runtime_cache_pin_limit_gib": Key(
        type=Annotated[float, Meta(ge=0, le=1e6)] | None,
        meaning="layerwise: most mapped weights that a rank page-locks (GiB), all or nothing; 0: "
        "copies are staged; null: what the host allows",
    ),
    "weight_cache_dir": Key(
        type=Text | None,
        meaning="folder of the runtime cache; null: OMNISTAGE_CACHE or the user's cache folder",
    ),
    "weight_cache_limit_gib": Key(
        type=Gibibytes | None,
        meaning="size of the runtime cache (GiB) above which unused entries go; null: no bound",
    ),
    "quantization_config": Key(
        type=Quantization,
        meaning="diffusion: precision of weights: fp8, none, or JSON: a mapping with a method, or "
        "one a component; null: as the checkpoint stores them",
    ),
    "enforce_eager": Key(
        type=bool, meaning="compile nothing, capture no graphs, fuse no layers on a GPU"
    ),
    "step_execution": Key(
        type=bool, meaning="diffusion: requests join and leave between denoising steps"
    ),
    "request_batch_max_wait_ms": Key(
        type=Milliseconds,
        meaning="diffusion, request mode: how long a batch may wait for more requests",
    ),
    "diffusion_streaming_output": Key(
        type=bool, meaning="diffusion: show previews to who asks; turns on step_execution"
    ),
    "max_num_batched_tokens": Key(type=Count, meaning="tokens: most tokens that one step computes"),
    "max_model_len": Key(
        type=Count | None,
        meaning="tokens: longest prompt and answer together; null: the model's own bound",
    ),
    "gpu_memory_utilization": Key(
        type=Fraction,
        meaning="tokens: fraction of a GPU's memory that the stage may fill, KV cache included",
    ),
    "kv_cache_gib": Key(
        type=Gibibytes | None,
        meaning="tokens: size of the KV cache (GiB); null: from gpu_memory_utilization, 1 on a CPU",
    ),
    "block_size": Key(
        type=Annotated[int, Meta(ge=1, le=1024)] | None,
        meaning="tokens: positions in one block of the KV cache; null: chosen by device",
    ),
    "enable_prefix_caching": Key(type=bool, meaning="tokens: reuse the KV cache of equal prefixes"),
    "enable_chunked_prefill": Key(
        type=bool, meaning="tokens: long prompts are computed in parts, beside decode steps"
    ),
    "async_chunk": Key(
        type=bool, meaning="start on partial input from the stage before; off: wait for all of it"
    ),
    "async_scheduling": Key(
        type=bool,
        meaning="token stages on a GPU: plan a step before the tokens of the last one are read",
    ),
    "fuse_layers": Key(type=bool, meaning="tokens: fuse projections and compile blocks on a GPU"),
    "init_timeout": Key(
        type=Seconds, meaning="seconds a replica may take to load", attribute="init_timeout_s"
    ),
    "heartbeat_timeout": Key(
        type=Seconds,
        meaning="seconds without a heartbeat before a replica counts as lost",
        attribute="heartbeat_timeout_s",
    ),
    "operation_limits": Key(
        type=dict,
        meaning="longest time an operation may take, by kind (seconds)",
        attribute="operation_limits_s",
        nested=OPERATION_LIMIT_KEYS,
    ),
    "restart": Key(type=dict, meaning="what happens after a replica died", nested=RESTART_KEYS),
    "default_sampling_params": Key(
        type=dict[str | int, Any],
        meaning="defaults for what a request leaves open; at the top also by stage id",
    ),
    "options": Key(type=dict[str, Any], meaning="passed to the stage's runtime as they are"),
    "tensor_parallel_size": Key(type=Count, meaning="ranks that share each weight matrix"),
    "sequence_parallel_size": Key(type=Count, meaning="ranks that share each sequence"),
    "ring_parallel_size": Key(type=Count, meaning="ranks that pass keys and values round a ring"),
    "data_parallel_size": Key(type=Count, meaning="ranks that each serve requests of their own"),
    "pipeline_parallel_size": Key(type=Count, meaning="ranks that hold consecutive layers"),
    "cfg_parallel_size": Key(type=Count, meaning="ranks that split the guidance branches"),
    "rank_parallel_size": Key(type=Count, meaning="ranks that divide work as the runtime likes"),
    "expert_parallel_size": Key(type=Count, meaning="ranks that share the experts of a layer"),
    "vae_patch_parallel_size": Key(
        type=Count, meaning="diffusion: ranks that decode parts of one picture"
    ),
    "use_hsdp": Key(type=bool, meaning="diffusion: ranks hold shards of the weights"),
    "hsdp_shard_size": Key(
        type=Literal[-1] | Count, meaning="HSDP: ranks that share one copy; -1: all of them"
    ),
    "hsdp_replicate_size": Key(type=Count, meaning="HSDP: copies of the shards"),
}

OFFLOAD_FLAGS = {
    "enable_distributed_layerwise_offload": "distributed-layerwise",
    "enable_layerwise_offload": "layerwise",
    "enable_cpu_offload": "model",
}
"""The strategy that each switch means; of several that are on the first wins."""

DIFFUSION_KEYS = (
    "step_execution",
    "request_batch_max_wait_ms",
    "diffusion_streaming_output",
    "memory",
    "offload",
    *OFFLOAD_FLAGS,
    "dlo_use_allgather",
    "dlo_resident_layers",
    "dlo_runtime_cache",
    "dlo_runtime_cache_pin_limit_gib",
    "weight_cache_dir",
    "weight_cache_limit_gib",
    "quantization_config",
)
TOKEN_KEYS = (
    "async_scheduling",
    "max_num_batched_tokens",
    "max_model_len",
    "gpu_memory_utilization",
    "kv_cache_gib",
    "block_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "fuse_layers",
)
KEYS_OF_KINDS: tuple[tuple[tuple[str, ...], str, tuple[ExecutionType, ...]], ...] = (
    (DIFFUSION_KEYS, "diffusion stages", (ExecutionType.DIFFUSION,)),
    (TOKEN_KEYS, "token stages", (ExecutionType.LLM_AR,)),
    (
        ("async_chunk",),
        "token and generation stages",
        (ExecutionType.LLM_AR, ExecutionType.LLM_GENERATION),
    ),
)
"""Keys for stages of some kinds only: (keys, name of the kinds, kinds). Set for a whole deployment
they are for its stages of those kinds; set for another stage, an error."""

PARALLEL_KEYS = tuple(
    name for name in STAGE_KEYS if name.endswith("_parallel_size") or "hsdp" in name
)

LIMIT_KEYS = {
    "max_inflight_requests": Key(type=Count, meaning="admission bound: one more gets 429 at once"),
    "request_timeout_s": Key(type=Seconds, meaning="longest a request may take"),
    "slow_client_timeout_s": Key(
        type=Seconds, meaning="how long a client may leave its full stream unread"
    ),
    "abort_timeout_s": Key(type=Seconds, meaning="how long a stage may take to confirm an abort"),
    "shutdown_timeout_s": Key(type=Seconds, meaning="how long an orderly shutdown may take"),
    "stream_buffer": Key(type=Count, meaning="events buffered for one client"),
}

DEPLOYMENT_KEYS = {
    "schema_version": Key(type=int, meaning="version of this schema", flag=False),
    "pipeline": Key(type=Text, meaning="model type that a deploy file is for", flag=False),
    "served_model_name": Key(type=Text, meaning="name of the model in the API"),
    "lb_policy": Key(
        type=Literal["least-queue-length", "round-robin", "random"],
        meaning="how a replica is chosen for a new request",
    ),
    "log_level": Key(
        type=Literal["debug", "info", "warning", "error"], meaning="how much is logged"
    ),
    "log_json": Key(type=bool, meaning="log one JSON object a line, in every process"),
    "limits": Key(type=dict, meaning="bounds of the engine", nested=LIMIT_KEYS),
}

ALIASES = {
    "ulysses_degree": "sequence_parallel_size",
    "usp": "sequence_parallel_size",
    "ring_degree": "ring_parallel_size",
    "ring": "ring_parallel_size",
    "quantization": "quantization_config",
    "diffusion_quantization_config": "quantization_config",
    "stage_init_timeout": "init_timeout",
    "init_timeout_s": "init_timeout",
    "heartbeat_timeout_s": "heartbeat_timeout",
    "omni_heartbeat_timeout": "heartbeat_timeout",
    "operation_limits_s": "operation_limits",
    "omni_lb_policy": "lb_policy",
}
"""Other spellings that mean the same."""
