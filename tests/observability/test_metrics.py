from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from omnistage.contracts.errors import OverloadedError, error_classes
from omnistage.contracts.outputs import FinishReason
from omnistage.observability.families import FAMILIES, PREFIX
from omnistage.observability.metrics import MAX_ROUTES, EngineMetrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("m")


def value(metrics: EngineMetrics, name: str, **labels: Any) -> float | None:
    texts = {"model_name": "m", **{key: str(text) for key, text in labels.items()}}
    return metrics.registry.get_sample_value(f"{PREFIX}_{name}", texts)


STATS = {
    "kv_blocks_used": 3,
    "kv_blocks_total": 12,
    "prefix_queries": 8,
    "prefix_hits": 6,
    "evictions": 2,
    "preemptions": 1,
}


def exercise(metrics: EngineMetrics) -> None:
    """Call every method once with ordinary values."""
    metrics.request_admitted()
    metrics.request_waiting(3)
    metrics.request_running(2)
    metrics.request_finished("stop", 1.5)
    metrics.request_failed("overloaded", 0.5)
    metrics.images_generated(4)
    metrics.stage_status("dit", 1, 5, 6)
    metrics.stage_loaded("dit", 1, 7.5)
    metrics.replica_up("dit", 1, True)
    metrics.replica_restarted("dit", 1)
    metrics.stage_finished("dit", 1, {"preprocess": 0.1, "exec": 2.0, "postprocess": 0.2}, 4)
    metrics.transfer("dit", 1, "vae", 0, nbytes=4096, rx_s=0.01, tx_s=0.02, in_flight_s=0.03)
    metrics.http_request("/v1/models", "GET", 200, 0.25)
    metrics.first_token(0.2)
    metrics.text_finished(prompt_tokens=9, cached_tokens=4, tokens=7, per_token_s=0.02)
    metrics.first_sound(0.3)
    metrics.sound_finished(duration_s=4.0, elapsed_s=1.0, underrun_s=0.25)
    metrics.token_stats("dit", 1, STATS)


@pytest.mark.invariant("OBS-INV-002")
def test_each_call_feeds_its_family(metrics: EngineMetrics) -> None:
    exercise(metrics)
    replica, edge = (
        {"stage": "dit", "replica": 1},
        {"from_stage": "dit", "from_replica": 1, "to_stage": "vae", "to_replica": 0},
    )
    assert value(metrics, "requests_admitted_total") == 1
    assert value(metrics, "num_requests_waiting") == 3
    assert value(metrics, "num_requests_running") == 2
    assert value(metrics, "requests_success_total", finished_reason="stop") == 1
    assert value(metrics, "requests_failed_total", error_type="overloaded") == 1
    assert value(metrics, "e2e_request_latency_seconds_count") == 2
    assert value(metrics, "e2e_request_latency_seconds_sum") == 2.0
    assert value(metrics, "images_generated_total") == 4
    assert value(metrics, "stage_requests_running", **replica) == 5
    assert value(metrics, "stage_requests_waiting", **replica) == 6
    assert value(metrics, "stage_load_seconds", **replica) == 7.5
    assert value(metrics, "replica_up", **replica) == 1
    assert value(metrics, "replica_restarts_total", **replica) == 1
    assert value(metrics, "diffusion_preprocess_seconds_sum", **replica) == 0.1
    assert value(metrics, "diffusion_exec_seconds_sum", **replica) == 2.0
    assert value(metrics, "diffusion_exec_per_step_seconds_sum", **replica) == 0.5
    assert value(metrics, "diffusion_postprocess_seconds_sum", **replica) == 0.2
    assert value(metrics, "transfer_size_bytes_sum", **edge) == 4096
    assert value(metrics, "transfer_rx_seconds_sum", **edge) == 0.01
    assert value(metrics, "transfer_tx_seconds_sum", **edge) == 0.02
    assert value(metrics, "transfer_in_flight_seconds_sum", **edge) == 0.03
    http = {"route": "/v1/models", "method": "GET", "status": 200}
    assert value(metrics, "http_requests_total", **http) == 1
    assert value(metrics, "http_request_seconds_sum", route="/v1/models") == 0.25
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.2
    assert value(metrics, "time_per_output_token_seconds_sum") == 0.02
    assert value(metrics, "prompt_tokens_total") == 9
    assert value(metrics, "prompt_tokens_cached_total") == 4
    assert value(metrics, "generation_tokens_total") == 7
    assert value(metrics, "audio_time_to_first_packet_seconds_sum") == 0.3
    assert value(metrics, "audio_real_time_ratio_sum") == 0.25
    assert value(metrics, "audio_duration_seconds_sum") == 4.0
    assert value(metrics, "audio_underrun_seconds_sum") == 0.25
    assert value(metrics, "kv_cache_usage_ratio", **replica) == 0.25
    assert value(metrics, "prefix_cache_queries_total", **replica) == 8
    assert value(metrics, "prefix_cache_hits_total", **replica) == 6
    assert value(metrics, "prefix_cache_evictions_total", **replica) == 2
    assert value(metrics, "preemptions_total", **replica) == 1


@pytest.mark.invariant("OBS-INV-002")
def test_no_family_is_left_unfed(metrics: EngineMetrics) -> None:
    exercise(metrics)
    exposed = text_string_to_metric_families(metrics.render()[0].decode())
    fed = {f"{sample.name}" for family in exposed for sample in family.samples if sample.value}
    for family in FAMILIES:
        name = family.exposed_name + ("_count" if family.kind == "histogram" else "")
        assert name in fed, name


@pytest.mark.invariant("OBS-INV-002")
def test_the_page_lists_the_families_as_they_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.M)
    documented = {name: (kind, labels.strip(), text.strip()) for name, kind, labels, text in rows}
    assert documented == {
        family.exposed_name: (
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels) or "none",
            family.meaning,
        )
        for family in FAMILIES
    }


def test_names_have_base_units_and_the_prefix() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"omnistage_[a-z0-9_]+", family.exposed_name)
        assert not re.search(r"_(s|ms|mb|gib|us)(_|$)", family.exposed_name)
        if family.kind == "histogram":
            assert family.name.endswith(("_seconds", "_bytes", "_ratio"))
            assert list(family.buckets) == sorted(family.buckets)


@pytest.mark.invariant("OBS-INV-003")
@pytest.mark.parametrize("junk", ["req-123", "a cat", "", "Stop"])
def test_labels_outside_the_known_values_count_as_other(metrics: EngineMetrics, junk: str) -> None:
    metrics.request_finished(junk, 1)
    metrics.request_failed(junk, 1)
    metrics.http_request("/x", junk, 7, 1)
    assert value(metrics, "requests_success_total", finished_reason="other") == 1
    assert value(metrics, "requests_failed_total", error_type="other") == 1
    assert value(metrics, "http_requests_total", route="/x", method="other", status="other") == 1


@pytest.mark.invariant("OBS-INV-003")
def test_every_known_reason_and_error_has_its_own_label(metrics: EngineMetrics) -> None:
    for reason in FinishReason:
        metrics.request_finished(reason, 1)
        assert value(metrics, "requests_success_total", finished_reason=reason.value) == 1
    for error_type in error_classes():
        metrics.request_failed(error_type, 1)
        assert value(metrics, "requests_failed_total", error_type=error_type) == 1
    assert OverloadedError.type in error_classes()


@pytest.mark.invariant("OBS-INV-003")
def test_a_flood_of_routes_stays_bounded(metrics: EngineMetrics) -> None:
    for n in range(MAX_ROUTES + 50):
        metrics.http_request(f"/r{n}", "GET", 404, 0.1)
    metrics.http_request("/r0", "GET", 404, 0.1)
    exposed = text_string_to_metric_families(metrics.render()[0].decode())
    routes = {s.labels["route"] for f in exposed for s in f.samples if "route" in s.labels}
    assert len(routes) == MAX_ROUTES + 1
    assert value(metrics, "http_requests_total", route="other", method="GET", status=404) == 50
    assert value(metrics, "http_requests_total", route="/r0", method="GET", status=404) == 2


def test_two_engines_do_not_share_numbers() -> None:
    first, second = EngineMetrics("m"), EngineMetrics("m")
    first.request_admitted()
    assert value(first, "requests_admitted_total") == 1
    assert value(second, "requests_admitted_total") == 0


def test_a_registry_can_be_given() -> None:
    registry = CollectorRegistry()
    EngineMetrics("m", registry).request_admitted()
    labels = {"model_name": "m"}
    assert registry.get_sample_value("omnistage_requests_admitted_total", labels) == 1


def test_phases_nobody_measured_are_left_out(metrics: EngineMetrics) -> None:
    metrics.stage_finished("s", 0, {"exec": 1.0, "queue": 3.0}, None)
    metrics.stage_finished("s", 0, {"exec": 1.0}, 0)
    metrics.stage_finished("s", 0, {}, 5)
    metrics.transfer("a", 0, "b", 0, nbytes=1, rx_s=0.5)
    replica = {"stage": "s", "replica": 0}
    edge = {"from_stage": "a", "from_replica": 0, "to_stage": "b", "to_replica": 0}
    assert value(metrics, "diffusion_exec_seconds_count", **replica) == 2
    assert value(metrics, "diffusion_exec_per_step_seconds_count", **replica) is None
    assert value(metrics, "diffusion_preprocess_seconds_count", **replica) is None
    assert value(metrics, "transfer_tx_seconds_count", **edge) is None
    assert value(metrics, "transfer_rx_seconds_count", **edge) == 1


def test_a_replica_goes_up_and_down(metrics: EngineMetrics) -> None:
    for up in (True, False):
        metrics.replica_up("s", 0, up)
        assert value(metrics, "replica_up", stage="s", replica=0) == int(up)


def test_the_page_has_the_content_type_of_prometheus(metrics: EngineMetrics) -> None:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    assert body.endswith(b"\n")


def test_totals_of_a_stage_grow_also_over_its_restart(metrics: EngineMetrics) -> None:
    for total in (5, 5, 8, 2, 3):
        metrics.token_stats("s", 0, {"preemptions": total})
    assert value(metrics, "preemptions_total", stage="s", replica=0) == 11
    assert value(metrics, "kv_cache_usage_ratio", stage="s", replica=0) is None


def test_what_was_not_streamed_has_no_time_per_token_and_no_underrun(
    metrics: EngineMetrics,
) -> None:
    metrics.text_finished(prompt_tokens=1, cached_tokens=0, tokens=5, per_token_s=None)
    metrics.sound_finished(duration_s=1.0, elapsed_s=2.0, underrun_s=None)
    assert value(metrics, "time_per_output_token_seconds_count") == 0
    assert value(metrics, "audio_underrun_seconds_count") == 0
