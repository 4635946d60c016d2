"""Prometheus metrics of one engine. Families and their meaning: `families.py`."""

from __future__ import annotations

from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from omnistage.contracts.errors import error_classes
from omnistage.contracts.outputs import FinishReason
from omnistage.observability.families import FAMILIES, PREFIX, Family

OTHER = "other"
MAX_ROUTES = 128
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FINISH_REASONS = frozenset(str(reason) for reason in FinishReason)
_STAGE_TOTALS = {
    "prefix_queries": "prefix_cache_queries",
    "prefix_hits": "prefix_cache_hits",
    "evictions": "prefix_cache_evictions",
    "preemptions": "preemptions",
}
"""From a token scheduler's `stats` to families."""
_PHASES = ("preprocess", "exec", "postprocess")


class EngineMetrics:
    """Metrics of one engine, in a registry of its own unless one is given.

    Values of labels come from closed sets; anything else counts as "other". Methods are cheap, may
    be called from any thread, and raise only for programming errors.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._model_name = model_name
        self._routes: set[str] = set()
        self._totals: dict[tuple[str, str, int], float] = {}
        self._families = {family.name: _build(family, self.registry) for family in FAMILIES}
        for family in FAMILIES:
            if not family.labels:
                self._of(family.name)  # Shown as 0 from the start, so that rates have a beginning.

    def render(self) -> tuple[bytes, str]:
        """The body of `/metrics` and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    # requests ------------------------------------------------------------------------------------

    def request_admitted(self) -> None:
        self._of("requests_admitted").inc()

    def request_waiting(self, count: int) -> None:
        self._of("num_requests_waiting").set(count)

    def request_running(self, count: int) -> None:
        self._of("num_requests_running").set(count)

    def request_finished(self, reason: str, e2e_s: float) -> None:
        """`reason` is a `FinishReason`; `e2e_s` counts from admission."""
        self._of("requests_success", _known(str(reason), _FINISH_REASONS)).inc()
        self._of("e2e_request_latency_seconds").observe(e2e_s)

    def request_failed(self, error_type: str, e2e_s: float) -> None:
        """`error_type` is the `type` of an `OmniError`."""
        self._of("requests_failed", _known(error_type, error_classes())).inc()
        self._of("e2e_request_latency_seconds").observe(e2e_s)

    def images_generated(self, count: int) -> None:
        self._of("images_generated").inc(count)

    def first_token(self, seconds: float) -> None:
        """Since admission."""
        self._of("time_to_first_token_seconds").observe(seconds)

    def text_finished(
        self, *, prompt_tokens: int, cached_tokens: int, tokens: int, per_token_s: float | None
    ) -> None:
        """One child's text. `per_token_s` None: it was not streamed, or one piece."""
        self._of("prompt_tokens").inc(prompt_tokens)
        self._of("prompt_tokens_cached").inc(cached_tokens)
        self._of("generation_tokens").inc(tokens)
        if per_token_s is not None:
            self._of("time_per_output_token_seconds").observe(per_token_s)

    def first_sound(self, seconds: float) -> None:
        """Since admission."""
        self._of("audio_time_to_first_packet_seconds").observe(seconds)

    def sound_finished(
        self, *, duration_s: float, elapsed_s: float, underrun_s: float | None
    ) -> None:
        """One child's sound, `elapsed_s` after admission; `underrun_s` None: it came in one
        piece."""
        self._of("audio_duration_seconds").observe(duration_s)
        self._of("audio_real_time_ratio").observe(elapsed_s / duration_s)
        if underrun_s is not None:
            self._of("audio_underrun_seconds").observe(underrun_s)

    # stages and replicas -------------------------------------------------------------------------

    def stage_status(self, stage: str, replica: int, running: int, waiting: int) -> None:
        self._of("stage_requests_running", stage, replica).set(running)
        self._of("stage_requests_waiting", stage, replica).set(waiting)

    def token_stats(self, stage: str, replica: int, stats: dict[str, float]) -> None:
        """What a token stage counts itself, since its own start: a smaller total than the last one
        heard means that the replica has started anew."""
        if stats.get("kv_blocks_total"):
            usage = stats.get("kv_blocks_used", 0) / stats["kv_blocks_total"]
            self._of("kv_cache_usage_ratio", stage, replica).set(usage)
        for name, family in _STAGE_TOTALS.items():
            if name in stats:
                place = (family, stage, replica)
                grown = stats[name] - self._totals.get(place, 0)
                self._totals[place] = stats[name]
                self._of(*place).inc(stats[name] if grown < 0 else grown)

    def stage_loaded(self, stage: str, replica: int, load_s: float) -> None:
        self._of("stage_load_seconds", stage, replica).set(load_s)

    def replica_up(self, stage: str, replica: int, up: bool) -> None:
        self._of("replica_up", stage, replica).set(int(up))

    def replica_restarted(self, stage: str, replica: int) -> None:
        self._of("replica_restarts", stage, replica).inc()

    def stage_finished(
        self, stage: str, replica: int, timings_s: dict[str, float], steps: int | None
    ) -> None:
        """One request's phases at one stage: "preprocess", "exec", "postprocess", in seconds.
        Other phases are not counted; `steps` None or 0 leaves the time per step out."""
        for phase in _PHASES:
            if phase in timings_s:
                self._of(f"diffusion_{phase}_seconds", stage, replica).observe(timings_s[phase])
        if steps and "exec" in timings_s:
            per_step_s = timings_s["exec"] / steps
            self._of("diffusion_exec_per_step_seconds", stage, replica).observe(per_step_s)

    def transfer(
        self,
        from_stage: str,
        from_replica: int,
        to_stage: str,
        to_replica: int,
        *,
        nbytes: int,
        rx_s: float,
        tx_s: float | None = None,
        in_flight_s: float | None = None,
    ) -> None:
        """One payload from one replica to another; times that nobody measured are left out."""
        edge = (from_stage, from_replica, to_stage, to_replica)
        self._of("transfer_size_bytes", *edge).observe(nbytes)
        times_s = {"rx": rx_s, "tx": tx_s, "in_flight": in_flight_s}
        for part, seconds in times_s.items():
            if seconds is not None:
                self._of(f"transfer_{part}_seconds", *edge).observe(seconds)

    # HTTP ----------------------------------------------------------------------------------------

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """`route` is the route's template, never a path; past 128 of them the rest is "other"."""
        route = self._bounded_route(route)
        code = str(status) if 100 <= status <= 599 else OTHER
        self._of("http_requests", route, _known(method, METHODS), code).inc()
        self._of("http_request_seconds", route).observe(seconds)

    def _bounded_route(self, route: str) -> str:
        if route not in self._routes:
            if len(self._routes) >= MAX_ROUTES:
                return OTHER
            self._routes.add(route)
        return route

    def _of(self, family: str, *labels: str | int) -> Any:
        return self._families[family].labels(self._model_name, *map(str, labels))


def _build(family: Family, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name = f"{PREFIX}_{family.name}"
    labels = ("model_name", *family.labels)
    if family.kind == "histogram":
        return Histogram(name, family.meaning, labels, buckets=family.buckets, registry=registry)
    kind = Counter if family.kind == "counter" else Gauge
    return kind(name, family.meaning, labels, registry=registry)


def _known(value: str, allowed: Any) -> str:
    return value if value in allowed else OTHER
