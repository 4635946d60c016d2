"""Times that are tried: of every operation of a pass, kept in a file, and bounded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.planning.facts import HOST_OP_S, find_facts
from omnistage.memory.planning.measure import OpTimeCache, measure_link, measure_ops
from omnistage.memory.planning.profile import profile_forward
from omnistage.memory.planning.times import FUSED_TRAFFIC, OpTimes, roofline_s
from omnistage.platforms.registry import platform_of
from tests.memory.offload.fake_device import late_device
from tests.memory.planning.modules import components, run_for

CPU = platform_of("cpu")


@pytest.fixture(scope="module")
def facts():
    return find_facts(CPU, "cpu")


@pytest.fixture(scope="module")
def profile():
    modules = components("flux")
    return profile_forward(
        modules["transformer"], run_for(modules["transformer"], "float32", modules["vae"])
    )


def test_every_operation_of_a_pass_can_be_tried_again(profile, facts):
    found = measure_ops(profile.ops, CPU, facts, limit_s=60)
    assert found.keys() == profile.ops.keys()
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.invariant("PLAN-INV-007")
def test_what_was_measured_is_read_by_another_process(profile, facts, tmp_path):
    path = tmp_path / "cache" / "op_times.json"
    first = measure_ops(profile.ops, CPU, facts, cache=path, limit_s=60)
    written = path.stat()
    again = measure_ops(profile.ops, CPU, facts, cache=path, limit_s=0)
    assert again == first
    assert path.stat().st_ino == written.st_ino, "nothing new was measured, yet it was written"
    assert OpTimeCache(path, "another device").read() == {}
    assert [one.name for one in path.parent.iterdir()] == ["op_times.json"]


@pytest.mark.invariant("PLAN-INV-007")
def test_time_for_measuring_is_bounded_and_the_rest_is_assumed(profile, facts):
    assert measure_ops(profile.ops, CPU, facts, limit_s=0) == {}
    times = OpTimes(facts=facts)
    assert times.device_s(profile.ops) > 0
    assert times.measured_share(profile.ops) == 0


def test_a_broken_file_is_left_aside(profile, facts, tmp_path, caplog):
    path = tmp_path / "op_times.json"
    path.write_text("{")
    assert measure_ops(profile.ops, CPU, facts, cache=path, limit_s=60)
    assert "is left aside" in caplog.text
    store = OpTimeCache(path, facts.label)
    assert store.read()
    (owner,) = json.loads(path.read_text())
    for entry in ([1], None, {"matmul": "long", "add": None, "mul": -1.0, "exp": float("nan")}):
        path.write_text(json.dumps({owner: entry}))
        assert store.read() == {}
    path.write_text("[" * 200_000 + "]" * 200_000)
    assert store.read() == {}


def test_compiled_blocks_move_less(profile, facts):
    eager, compiled = OpTimes(facts=facts), OpTimes(facts=facts, compiled=True)
    pointwise = {op: n for op, n in profile.ops.items() if op.kind == "pointwise"}
    rest = {op: n for op, n in profile.ops.items() if op.kind != "pointwise"}
    whole_s = sum(n * roofline_s(op, facts) for op, n in pointwise.items())
    assert compiled.device_s(pointwise) == pytest.approx(whole_s * FUSED_TRAFFIC)
    assert compiled.device_s(rest) == eager.device_s(rest)
    assert compiled.device_s(pointwise, is_block=False) == eager.device_s(pointwise)


def test_a_host_that_is_slower_than_its_device(profile, facts):
    """Figures of one H200, in the module's own words."""
    quick = replace(facts, host_op_s=HOST_OP_S)
    eager, compiled = OpTimes(facts=quick), OpTimes(facts=quick, compiled=True)
    count = sum(profile.ops.values())
    assert eager.host_s(profile.ops) == pytest.approx(count * HOST_OP_S)
    assert compiled.host_s(profile.ops) < eager.host_s(profile.ops)
    assert OpTimes(facts=facts).host_s(profile.ops) == 0


def test_the_link_is_measured_and_nothing_stays_locked():
    with late_device() as platform:
        assert measure_link(platform, "cpu", 2**20) > 0
        assert not platform.locked
    with pytest.raises(UnsupportedCombinationError, match="page-locked"):
        measure_link(CPU, "cpu", 2**20)
