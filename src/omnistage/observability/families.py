"""The metric families: name, kind, labels, meaning. `docs/metrics.md` lists the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "omnistage"

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
SECONDS_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SECONDS_OF_A_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1,
    5,
)
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.5, 2, 5)
BYTES = tuple(float(4**n) for n in range(5, 17))
"""1 KiB to 4 GiB."""

STAGE = ("stage", "replica")
EDGE = ("from_stage", "from_replica", "to_stage", "to_replica")


@dataclass(frozen=True)
class Family:
    """`labels` come behind `model_name`, which every family has. `name` lacks the prefix and, for
    counters, the `_total` that is added to it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        suffix = "_total" if self.kind == "counter" else ""
        return f"{PREFIX}_{self.name}{suffix}"


FAMILIES = (
    Family("num_requests_running", "gauge", (), "Requests that a stage has or is about to get"),
    Family("num_requests_waiting", "gauge", (), "Requests that wait in the orchestrator's queue"),
    Family("requests_admitted", "counter", (), "Requests that passed admission"),
    Family(
        "requests_success",
        "counter",
        ("finished_reason",),
        "Requests that ended as asked: stop, length, or abort by the client",
    ),
    Family("requests_failed", "counter", ("error_type",), "Requests that ended with an error"),
    Family(
        "e2e_request_latency_seconds",
        "histogram",
        (),
        "From admission to the terminal event, whatever it is",
        SECONDS,
    ),
    Family("stage_requests_running", "gauge", STAGE, "Requests that a replica works on"),
    Family("stage_requests_waiting", "gauge", STAGE, "Requests in a replica's queue"),
    Family("stage_load_seconds", "gauge", STAGE, "What the replica's last load took"),
    Family("replica_up", "gauge", STAGE, "1 while the replica can serve, else 0"),
    Family("replica_restarts", "counter", STAGE, "Restarts of a replica that died or hung"),
    Family("diffusion_preprocess_seconds", "histogram", STAGE, "Until denoising", SECONDS_FAST),
    Family("diffusion_exec_seconds", "histogram", STAGE, "Denoising of one request", SECONDS),
    Family(
        "diffusion_exec_per_step_seconds",
        "histogram",
        STAGE,
        "Denoising of one request over its number of steps",
        SECONDS_FAST,
    ),
    Family(
        "diffusion_postprocess_seconds",
        "histogram",
        STAGE,
        "After denoising: decoding and conversion",
        SECONDS_FAST,
    ),
    Family(
        "time_to_first_token_seconds",
        "histogram",
        (),
        "From admission to the first piece of streamed text",
        SECONDS_FAST,
    ),
    Family(
        "time_per_output_token_seconds",
        "histogram",
        (),
        "Mean time between two tokens of a streamed text, behind its first piece",
        SECONDS_OF_A_TOKEN,
    ),
    Family("prompt_tokens", "counter", (), "Tokens of the prompts of finished texts"),
    Family("prompt_tokens_cached", "counter", (), "Those of them that a prefix cache held"),
    Family("generation_tokens", "counter", (), "Tokens of finished texts"),
    Family("kv_cache_usage_ratio", "gauge", STAGE, "Blocks of keys and values in use, of all"),
    Family("prefix_cache_queries", "counter", STAGE, "Blocks looked up in the prefix cache"),
    Family("prefix_cache_hits", "counter", STAGE, "Blocks found there"),
    Family("prefix_cache_evictions", "counter", STAGE, "Cached blocks given up for others"),
    Family("preemptions", "counter", STAGE, "Sequences set back for lack of blocks"),
    Family(
        "audio_time_to_first_packet_seconds",
        "histogram",
        (),
        "From admission to the first sound",
        SECONDS_FAST,
    ),
    Family(
        "audio_real_time_ratio",
        "histogram",
        (),
        "Time from admission to the last sound over the length of the sound (RTF)",
        RATIOS,
    ),
    Family("audio_duration_seconds", "histogram", (), "Length of a finished sound", SECONDS),
    Family(
        "audio_underrun_seconds",
        "histogram",
        (),
        "How long a player that starts with the first sound stands still, in all",
        (0, *SECONDS_FAST),
    ),
    Family("transfer_size_bytes", "histogram", EDGE, "Tensor bytes of one payload", BYTES),
    Family("transfer_tx_seconds", "histogram", EDGE, "Sender's part of a transfer", SECONDS_FAST),
    Family("transfer_rx_seconds", "histogram", EDGE, "Receiver's part", SECONDS_FAST),
    Family("transfer_in_flight_seconds", "histogram", EDGE, "Between the two", SECONDS_FAST),
    Family("images_generated", "counter", (), "Images in answers"),
    Family("http_requests", "counter", ("route", "method", "status"), "HTTP requests answered"),
    Family("http_request_seconds", "histogram", ("route",), "From head to end of body", SECONDS),
)
