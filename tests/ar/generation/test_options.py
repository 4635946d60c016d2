"""Settings of a generation stage, refused before anything is loaded."""

from __future__ import annotations

import pytest

from omnistage.ar.generation.options import CPU_BATCH_FRAMES, read_generation_options
from omnistage.ar.generation.runtime import GenerationRuntime
from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from tests.ar.generation.codecs import generation_stage

CODEC = {"codec_model": "tests.ar.generation.codecs:build_running_sum"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec_chunk_frame": 5}, "did you mean 'codec_chunk_frames'"),
        ({"codec_chunk_frames": 0}, "must be a positive integer, got 0"),
        ({"codec_chunk_frames": True}, "must be a positive integer, got True"),
        ({"initial_codec_chunk_frames": 30}, "30, more than codec_chunk_frames 25"),
        ({"codec_chunk_frames": 301}, "301, more than full_pass_frames 300"),
        ({"max_streams": 2}, "max_num_seqs is 8, more than max_streams 2"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises((ConfigurationError, UnsupportedCombinationError), match=message):
        GenerationRuntime.scheduler(generation_stage(options=options))


def test_the_codec_must_be_named_and_exist():
    stage = generation_stage()
    del stage.options["codec_model"]
    with pytest.raises(ConfigurationError, match="codec_model is missing"):
        GenerationRuntime.scheduler(stage)
    stage = generation_stage(options={"codec_model": "tests.ar.generation.codecs:Nothing"})
    with pytest.raises(ConfigurationError, match="Nothing"):
        GenerationRuntime.executor(stage, 0, 1).load(lambda note, fraction: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(tensor_parallel_size=2)}, "2 ranks is not there yet"),
    ],
)
def test_what_is_not_there_is_refused(changes, message):
    with pytest.raises(UnsupportedCombinationError, match=message):
        GenerationRuntime.scheduler(generation_stage(**changes))


def test_batches_are_small_on_a_cpu_unless_told_otherwise():
    stage = generation_stage()
    assert read_generation_options(stage).max_batch_frames == 4096
    del stage.options["max_batch_frames"]
    assert read_generation_options(stage).max_batch_frames == CPU_BATCH_FRAMES


def test_sizes_of_pieces_are_few():
    assert read_generation_options(generation_stage()).piece_sizes == (4, 25)
    whole = read_generation_options(generation_stage(async_chunk=False))
    assert whole.piece_sizes == (4, 25, 50, 100, 200, 300)
