"""Ranks that share streamed weights: equal to one that holds all, bit for bit, or a clear error."""

from __future__ import annotations

import pytest

from omnistage.config.resolved import ParallelConfig
from tests.checkpoints import checkpoint
from tests.memory.offload import distributed_work as work
from tests.memory.offload.ranks import on_ranks


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-001")
@pytest.mark.parametrize("residents", [(), (1, 3)])
@pytest.mark.parametrize("name", ["qwen", "flux"])
def test_gathered_equals_resident_bit_for_bit(name, residents):
    for result in on_ranks(work.passes, name, residents):
        equal, described, (locked_bytes, left_bytes), overtaken = result
        assert equal == [True] * 3
        assert (described["shares"], described["shared_by"]) == (2, "data")
        assert described["page_locked"]
        assert locked_bytes > 0
        assert (left_bytes, overtaken) == (0, 0)
        assert described["late_fetches"] == 1


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-001")
@pytest.mark.parametrize("compute", ["sd3", "unet"])
def test_shares_need_not_divide_evenly(compute):
    parallel = ParallelConfig(data_parallel_size=3)
    for equal, described, locked, overtaken in on_ranks(work.passes, compute, parallel=parallel):
        assert equal == [True] * 3
        assert described["shares"] == 3
        assert (locked[1], overtaken) == (0, 0)


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-001")
@pytest.mark.parametrize("use_allgather", [True, False])
def test_float8_blocks_are_bytes_as_any(use_allgather):
    settings = {"use_allgather": use_allgather}
    arguments = ("flux", (), settings, None, work.quantized)
    for equal, *_ in on_ranks(work.passes, *arguments):
        assert equal == [True] * 3


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-001")
def test_components_whose_blocks_have_equal_paths():
    assert on_ranks(work.two_components) == [[True] * 4] * 2


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-001")
@pytest.mark.parametrize("forgotten", ["compute", "copy"])
def test_a_forgotten_wait_is_seen(forgotten):
    assert on_ranks(work.forgetful, forgotten) == [False, False]


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-002")
def test_each_rank_holds_its_share():
    count = 2
    for _, described, (locked_bytes, _), _ in on_ranks(work.passes, "flux"):
        streamed_bytes = described["gathered_bytes"]
        assert described["held_bytes"] * count >= streamed_bytes
        assert described["held_bytes"] <= 1.02 * streamed_bytes / count
        assert locked_bytes <= described["held_bytes"] + 4096
        slots_bytes = described["slot_bytes"]
        assert slots_bytes <= described["largest_block_bytes"] + 256 * count


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-002")
def test_of_mapped_files_only_the_share_is_page_locked_and_nothing_is_copied():
    folder = str(checkpoint("flux") / "transformer")
    for result in on_ranks(work.from_checkpoint, folder):
        equal, whole, locked_bytes, private_bytes, described = result
        assert equal == [True] * 2
        assert whole
        assert described["components"]["transformer"]["host"] == "checkpoint"
        assert private_bytes == 0
        blocks = described["components"]["transformer"]["streamed_blocks"]
        assert 0 < locked_bytes <= described["held_bytes"] + 2 * 4096 * blocks


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-003")
def test_rank_local_talks_to_nobody():
    results = on_ranks(work.passes, "flux", (0,), {"use_allgather": False})
    for equal, described, locked, overtaken in results:
        assert equal == [True] * 3
        assert (described["shares"], described["shared_by"], described["apart"]) == (1, None, [])
        assert (locked[1], overtaken) == (0, 0)


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-003")
def test_one_rank_talks_to_nobody():
    (result,) = on_ranks(work.passes, "qwen", parallel=ParallelConfig())
    equal, described, _, _ = result
    assert equal == [True] * 3
    assert (described["shares"], described["apart"]) == (1, [])


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-003")
@pytest.mark.parametrize(
    ("sizes", "dimension"),
    [({"sequence": 2}, "sequence"), ({"data": 2, "sequence": 2}, "data")],
)
def test_data_ranks_share_else_sequence_ranks(sizes, dimension):
    parallel = ParallelConfig(**{f"{name}_parallel_size": size for name, size in sizes.items()})
    for equal, described, _, _ in on_ranks(work.passes, "wan", parallel=parallel):
        assert equal == [True] * 3
        assert (described["shares"], described["shared_by"]) == (2, dimension)


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-004")
@pytest.mark.parametrize("refused", [{1: {1}}, {0: {1}, 1: {1}}, {1: {1, 2}}])
def test_page_locks_that_one_rank_is_refused(refused):
    """All fetch at the same time nevertheless, whether or not a rank has to stage its copies."""
    results = on_ranks(work.passes, "qwen", (), {}, refused)
    for equal, _, locked, overtaken in results:
        assert equal == [True] * 3
        assert (locked[1], overtaken) == (0, 0)
    found = [described["page_locked"] for _, described, _, _ in results]
    assert found == [number not in refused for number in range(2)]


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-004")
def test_after_a_pass_that_failed_alike_the_next_is_right():
    assert on_ranks(work.failing_alike) == [[True] * 6] * 2


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-005")
@pytest.mark.parametrize("kind", ["die", "hang", "raise"])
def test_a_rank_that_goes_wrong_ends_the_others_in_time(kind):
    deadline_s = 3.0
    results = on_ranks(work.going_wrong, kind, deadline_s=deadline_s, only=(0,))
    (name, words), again, waited_s, (locked_bytes, slots) = results[0]
    assert (name, again) == ("StageLostError", "StageLostError")
    assert "a rank of this stage" in words or "out of step" in words
    assert waited_s < 2 * deadline_s
    assert (locked_bytes, slots) == (0, [None, None])


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-005")
@pytest.mark.parametrize("orders", [((0, 1), (1, 0)), ((0, 2), (2, 0)), ((2, 1, 0), (2, 0, 1))])
def test_ranks_that_fall_out_of_step_fail(orders):
    results = on_ranks(work.out_of_step, orders, deadline_s=3.0)
    assert [result[0] for result in results] == ["StageLostError"] * 2
    assert any("fell out of step over their weights" in result[1] for result in results)


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-005")
def test_a_rank_that_makes_a_pass_alone_fails_in_time():
    first, second = on_ranks(work.out_of_step, ((), (0, 1, 2, 0, 1)), deadline_s=3.0)
    assert second[0] == "StageLostError"
    assert first == "in step"


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-005")
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_ranks_that_load_different_weights_fail_when_enabled(what):
    for name, words in on_ranks(work.different, what, deadline_s=5.0):
        assert name == "StageLostError"
        assert "out of step" in words


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-006")
def test_nothing_is_left_and_whole_blocks_go_as_soon_as_shares_are_there():
    for whole_is_gone, left, locked_bytes, refusal in on_ranks(work.leaving):
        assert all(whole_is_gone)
        assert not any(left)
        assert locked_bytes == 0
        assert "is not whole here" in refusal


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-006")
def test_a_device_that_is_full_leaves_the_pipeline_as_it_was():
    assert on_ranks(work.full_device) == [("OutOfMemoryError", True, True)] * 2
