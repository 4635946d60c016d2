"""Which frames are decoded when, and together."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OutOfMemoryError,
    OverloadedError,
    StageLostError,
)
from tests.ar.generation.codecs import (
    CODEBOOK_SIZE,
    NOT_A_NUMBER,
    Driver,
    expected_audio,
    generation_stage,
    some_codes,
)


def driver(window: int = 1000, **changes) -> Driver:
    return Driver(generation_stage(**changes), window=window)


def frames_of(command) -> list[int]:
    return [piece.frames for piece in command.data.fields["pieces"]]


def names_of(command) -> list[str]:
    return [identity.request_id for identity in command.identities]


def test_the_first_piece_is_short_and_the_rest_are_long():
    world = driver()
    codes = some_codes(60)
    world.add("a", codes)
    world.run()
    assert [frames_of(command) for command in world.commands] == [[4], [25], [25], [6]]
    assert world.finished("a")
    assert world.emissions["a"][-1].finish_reason == "stop"
    np.testing.assert_array_equal(world.audio("a"), expected_audio(codes))
    assert world.scheduler.counts() == (0, 0)
    assert world.model.sums == {}


def test_streamed_input_is_decoded_when_a_piece_is_full():
    world = driver()
    codes = some_codes(31)
    world.add("a", codes[:1], complete=False)
    decoded = []
    for frame in codes[1:]:
        world.run()
        decoded.append(sum(map(sum, map(frames_of, world.commands))))
        world.append("a", frame[None])
    world.run()
    assert decoded == [0] * 3 + [4] * 25 + [29] * 2
    assert not world.finished("a")
    world.end("a")
    world.run()
    assert world.finished("a")
    np.testing.assert_array_equal(world.audio("a"), expected_audio(codes))


def test_an_end_that_comes_after_the_last_frame_still_brings_the_tail():
    world = driver()
    codes = some_codes(4)
    world.add("a", codes, complete=False)
    world.run()
    assert len(world.emissions["a"]) == 1
    world.end("a")
    world.run()
    assert world.finished("a")
    np.testing.assert_array_equal(world.audio("a"), expected_audio(codes))


def test_no_frames_at_all_end_with_the_tail_alone():
    world = driver()
    world.add("a", np.zeros((0, 2), dtype=np.int64))
    world.run()
    assert world.finished("a")
    assert world.audio("a").tolist() == [-1.0]


@pytest.mark.invariant("AR-INV-124")
def test_equal_pieces_share_a_batch_and_ends_are_padded():
    world = driver(max_num_seqs=3)
    lengths = {"a": 29, "b": 29, "c": 11, "d": 4}
    codes = {name: some_codes(length, seed) for seed, (name, length) in enumerate(lengths.items())}
    for name, ids in codes.items():
        world.add(name, ids)
    world.run()
    assert [frames_of(command) for command in world.commands] == [[4, 4, 4], [4], [25, 25, 7]]
    assert world.model.batches == [(3, 4), (1, 4), (3, 25)]
    for name, ids in codes.items():
        np.testing.assert_array_equal(world.audio(name), expected_audio(ids))


@pytest.mark.invariant("AR-INV-124")
def test_who_would_run_out_of_audio_first_goes_first():
    """A frame is 0.1 s. The batch size is 1, so that order shows."""
    world = driver(max_num_seqs=1)
    world.add("a", some_codes(400), complete=False)
    world.step()  # 4 frames: a has audio until 0.4 s.
    world.now_s = 0.1
    world.add("b", some_codes(400), complete=False)
    assert names_of(world.step()) == ["b"]  # Nothing out yet: due since 0.1; then until 0.5 s.
    assert names_of(world.step()) == ["a"]  # Until 2.9 s.
    assert names_of(world.step()) == ["b"]  # Until 3.0 s.
    assert names_of(world.step()) == ["a"]
    world.now_s = 50.0  # Both have run out, b first.
    world.add("c", some_codes(400), complete=False)
    assert [names_of(world.step())[0] for _ in range(3)] == ["b", "a", "c"]


def test_priority_comes_before_urgency():
    world = driver(max_num_seqs=1)
    world.add("a", some_codes(40))
    world.add("b", some_codes(40), priority=1)
    assert [names_of(world.step())[0] for _ in range(4)] == ["b", "b", "b", "a"]


@pytest.mark.invariant("AR-INV-125")
def test_without_credits_a_stream_pauses_and_others_go_on():
    world = driver(window=2)
    world.add("a", some_codes(100, 1))
    world.add("b", some_codes(20, 2))
    world.run()
    assert (len(world.emissions["a"]), len(world.emissions["b"])) == (2, 2)
    assert world.finished("b")
    world.give_credits("a", 1)
    world.run()
    assert len(world.emissions["a"]) == 3
    world.give_credits("a", 10)
    world.run()
    np.testing.assert_array_equal(world.audio("a"), expected_audio(some_codes(100, 1)))


@pytest.mark.invariant("AR-INV-125")
def test_audio_that_is_still_being_built_counts_against_the_credits():
    world = driver(window=2)
    world.add("a", some_codes(100))
    while world.step(deliver=False):
        pass
    assert len(world.commands) == 2
    world.deliver()
    assert len(world.emissions["a"]) == 2


@pytest.mark.invariant("AR-INV-126")
@pytest.mark.parametrize("deliver", [True, False])
def test_abort_frees_at_once_and_touches_nobody(deliver):
    world = driver()
    world.add("a", some_codes(60, 1))
    world.add("b", some_codes(60, 2))
    world.step(deliver=deliver)
    world.abort("a")
    assert list(world.model.sums) == [1]
    assert world.scheduler.counts() == (1, 0)
    world.deliver()
    world.run()
    assert len(world.emissions.get("a", [])) == (1 if deliver else 0)
    np.testing.assert_array_equal(world.audio("b"), expected_audio(some_codes(60, 2)))
    assert world.model.sums == {}


@pytest.mark.invariant("AR-INV-126")
def test_a_stream_cancelled_while_its_command_runs_is_not_decoded():
    world = driver()
    world.add("a", some_codes(4, 1))
    world.add("b", some_codes(4, 2))
    world.cancelled = {("a", 0)}
    world.step()
    assert world.model.batches == [(1, 4)]
    world.abort("a")
    assert "a" not in world.emissions
    assert world.finished("b")
    assert world.scheduler.counts() == (0, 0)


def test_streams_beyond_those_with_state_wait():
    world = driver(max_num_seqs=2, options={"max_streams": 2})
    for name in "abc":
        world.add(name, some_codes(10), complete=name != "a")
    world.step()
    assert names_of(world.commands[0]) == ["a", "b"]
    assert world.scheduler.counts() == (2, 1)
    world.run()
    assert world.finished("b")
    assert world.finished("c")
    assert world.scheduler.counts() == (1, 0)


def test_more_than_the_queue_holds_is_refused_at_once():
    world = driver(options={"max_queued_requests": 1})
    world.add("a", some_codes(1), complete=False)
    with pytest.raises(OverloadedError, match="1 requests"):
        world.add("b", some_codes(1))


@pytest.mark.invariant("AR-INV-127")
def test_a_batch_that_fails_is_tried_again_one_by_one():
    world = driver()
    codes = {name: some_codes(8, seed) for seed, name in enumerate("abc")}
    for name, ids in codes.items():
        world.add(name, ids)

    def fail(batch: int) -> None:
        if batch > 1:
            raise RuntimeError("injected")

    world.model.fail = fail
    for _ in range(4):
        world.step()
    assert world.model.batches == [(3, 4), (1, 4), (1, 4), (1, 4)]
    world.model.fail = lambda batch: None
    world.run()
    for name, ids in codes.items():
        np.testing.assert_array_equal(world.audio(name), expected_audio(ids))


@pytest.mark.invariant("AR-INV-127")
def test_one_that_cannot_be_decoded_alone_fails_alone():
    world = driver()
    world.add("a", some_codes(8, 1))
    world.add("b", some_codes(8, 2))

    def fail(batch: int) -> None:
        if batch > 1 or len(world.model.batches) == 2:
            raise RuntimeError("injected")

    world.model.fail = fail
    world.run()
    assert isinstance(world.emissions["a"][0].error, InternalError)
    assert "injected" not in str(world.emissions["a"][0].error)
    np.testing.assert_array_equal(world.audio("b"), expected_audio(some_codes(8, 2)))
    assert world.model.sums == {}


def test_after_a_shortage_of_memory_batches_stay_smaller_until_the_stage_is_empty():
    world = driver()

    def fail(batch: int) -> None:
        if batch > 2:
            raise OutOfMemoryError("injected")

    def batches() -> list[int]:
        world.model.batches.clear()
        for name in "abcd":
            world.add(name, some_codes(54))
        world.run()
        return [batch for batch, _ in world.model.batches]

    world.model.fail = fail
    assert batches() == [4, 1, 1, 1, 1, 2, 2, 2, 2]
    world.model.fail = lambda batch: None
    assert batches() == [4, 4, 4]


def test_a_lost_device_is_not_tried_again():
    world = driver()
    world.add("a", some_codes(4))
    world.add("b", some_codes(4))
    command = world.scheduler.next_command()
    emissions = world.scheduler.fail(command, StageLostError("gone"))
    assert [type(one.error) for one in emissions] == [StageLostError] * 2
    assert world.scheduler.counts() == (0, 0)


@pytest.mark.invariant("AR-INV-127")
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[0, CODEBOOK_SIZE]], "allowed are 0 to 99"),
        ([[-1, 0]], "allowed are 0 to 99"),
        ([[1, 2, 3]], "3 codebooks; this codec has 2"),
    ],
)
def test_ids_outside_of_the_codebook_fail_their_request_only(bad, message):
    world = driver()
    world.add("bad", bad)
    world.add("good", some_codes(1))
    world.run()
    (emission,) = world.emissions["bad"]
    assert isinstance(emission.error, InvalidRequestError)
    assert message in str(emission.error)
    np.testing.assert_array_equal(world.audio("good"), expected_audio(some_codes(1)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(3, dtype=np.int64), r"shape \(3,\)"),
        (np.zeros((3, 2), dtype=np.float32), "float32"),
    ],
)
def test_codes_of_another_form_are_refused_at_once(bad, message):
    world = driver()
    with pytest.raises(InvalidRequestError, match=message):
        world.add("a", bad)
    world.add("b", some_codes(1), complete=False)
    with pytest.raises(InvalidRequestError, match="2 codebooks before and has 3 now"):
        world.append("b", np.zeros((1, 3), dtype=np.int64))


@pytest.mark.invariant("AR-INV-127")
def test_numbers_that_are_none_are_an_error_not_audio():
    world = driver()
    codes = some_codes(40)
    codes[20, 0] = NOT_A_NUMBER
    world.add("a", codes)
    world.add("b", some_codes(40, 2))
    world.run()
    assert [emission.error is None for emission in world.emissions["a"]] == [True, False]
    assert "invalid numbers" in str(world.emissions["a"][1].error)
    np.testing.assert_array_equal(world.audio("b"), expected_audio(some_codes(40, 2)))


def test_input_of_a_later_epoch_begins_a_new_waveform():
    world = driver()
    world.add("a", some_codes(10, 1), complete=False)
    world.step(deliver=False)
    world.append("a", some_codes(8, 2), epoch=1)
    world.append("a", some_codes(8, 3), epoch=0)
    world.scheduler.end_input(world.commands[0].identities[0], 1)
    world.deliver()
    world.run()
    np.testing.assert_array_equal(world.audio("a"), expected_audio(some_codes(8, 2)))
    assert world.finished("a")


@pytest.mark.invariant("AR-INV-128")
def test_without_async_chunk_nothing_begins_before_all_input_is_there():
    world = driver(async_chunk=False)
    codes = some_codes(320)
    world.add("a", codes[:200], complete=False)
    assert world.step() is None
    world.append("a", codes[200:])
    assert world.step() is None
    world.end("a")
    world.run()
    assert [frames_of(command) for command in world.commands] == [[300], [20]]
    np.testing.assert_array_equal(world.audio("a"), expected_audio(codes))


@pytest.mark.invariant("AR-INV-128")
def test_up_to_the_longest_pass_the_complete_input_is_one():
    world = driver(async_chunk=False)
    world.add("a", some_codes(130, 1))
    world.add("b", some_codes(180, 2))
    world.run()
    assert [frames_of(command) for command in world.commands] == [[130, 180]]
    assert len(world.emissions["a"]) == len(world.emissions["b"]) == 1
    for seed, name in enumerate("ab", start=1):
        length = {"a": 130, "b": 180}[name]
        np.testing.assert_array_equal(world.audio(name), expected_audio(some_codes(length, seed)))


def test_ends_are_padded_to_captured_sizes():
    world = driver()
    world.model.captured_sizes = (4, 25)
    world.add("a", some_codes(10))
    world.run()
    assert world.model.batches == [(1, 4), (1, 25)]
    np.testing.assert_array_equal(world.audio("a"), expected_audio(some_codes(10)))


def test_a_batch_is_bounded_by_its_frames_but_has_one_stream_at_least():
    world = driver(options={"max_batch_frames": 20})
    for seed, name in enumerate("abcdef"):
        world.add(name, some_codes(29, seed))
    world.run()
    assert world.model.batches == [(5, 4), (1, 4)] + [(1, 25)] * 6
