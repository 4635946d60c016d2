"""What operators see of a served model: request ids in answers and log, metrics, the taken port."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omnistage.observability.families import FAMILIES
from tests.cli.running import run, the_error
from tests.e2e.serving import Server, model, post, wait_until

pytestmark = pytest.mark.slow

PICTURES = 3


def test_a_request_id_is_in_the_answer_and_in_the_log(server: Server) -> None:
    with server.client(headers={"X-Request-Id": "mine-1"}) as client:
        answer = client.get("/v1/models")
    assert answer.headers["x-request-id"] == "mine-1"
    given = post(server).headers["x-request-id"]
    assert given != post(server).headers["x-request-id"]
    for request_id, words in (("mine-1", "/v1/models 200"), (given, "generations 200")):
        (entry,) = [one for one in server.log_entries() if one["request_id"] == request_id]
        assert words in str(entry["message"])


def test_log_entries_of_the_server_and_its_replica_have_one_form(server: Server) -> None:
    entries = server.log_entries()
    assert " request_id=" not in server.log, "a line in the other form"
    assert any("loading" in str(entry["message"]) for entry in entries)
    assert all({"time", "level", "message", "request_id"} <= set(entry) for entry in entries)


def test_metrics_count_what_happened(server: Server) -> None:
    before = samples(server)
    assert post(server, n=PICTURES, seed=1).status_code == 200
    assert post(server, size="9x9x9").status_code == 400
    wait_until(lambda: samples(server)["omnistage_num_requests_running"] == 0, "the end")
    after = samples(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("omnistage_images_generated_total") == PICTURES
    for name in ("requests_admitted_total", "e2e_request_latency_seconds_count"):
        assert grown(f"omnistage_{name}") == 1
    for phase in ("preprocess", "exec", "exec_per_step", "postprocess"):
        assert grown(f"omnistage_diffusion_{phase}_seconds_count") == 1
    assert grown("omnistage_http_requests_total") >= 2
    whole_s = grown("omnistage_e2e_request_latency_seconds_sum")
    parts_s = sum(
        grown(f"omnistage_diffusion_{phase}_seconds_sum")
        for phase in ("preprocess", "exec", "postprocess")
    )
    assert 0 < parts_s <= whole_s
    assert after["omnistage_replica_up"] == 1
    assert after["omnistage_stage_load_seconds"] > 0


def test_metrics_have_every_family_of_the_table(server: Server) -> None:
    with server.client() as client:
        text = client.get("/metrics").text
    exposed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {family.exposed_name for family in FAMILIES} <= exposed


def samples(server: Server) -> dict[str, float]:
    """Summed over labels."""
    with server.client() as client:
        text = client.get("/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_a_second_server_on_the_port_is_refused(server: Server) -> None:
    ended = run(["serve", model(), "--port", str(server.port), "--device", "cpu"])
    assert ended.code == 2
    assert f"port {server.port} on 127.0.0.1 is taken" in the_error(ended)
    assert ended.out == ""
    assert post(server).status_code == 200
