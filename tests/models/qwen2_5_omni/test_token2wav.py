"""Codec ids → sound: one pass is the library's, chunks come close to it and have no seams."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from omnistage.ar.generation.codec import TakesLong
from omnistage.config.pipeline import ExecutionType
from omnistage.contracts.errors import CheckpointError, ConfigurationError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.models.qwen2_5_omni.codes import SPEECH, SpeechSettings
from omnistage.models.qwen2_5_omni.loading import build_token2wav
from omnistage.models.qwen2_5_omni.pipeline import TOKEN2WAV, pipeline_config
from omnistage.models.qwen2_5_omni.vocoder import reach_frames
from omnistage.models.qwen2_5_omni.voices import read_voices
from tests.models.qwen2_5_omni import reference
from tests.models.qwen2_5_omni.requests import resolved

LOUD_RMS = 0.05
ONE_PASS, CHUNKS = 1e-5, 5e-3
"""Of the peak, at most."""
ROUNDED = 1e-4
"""As well, for the same sums in another order over 36 evaluations."""
LENGTHS = (1, 11, 12, 36, 37, 151)
PIECE = 25


def built(**options):
    stage = resolved(TOKEN2WAV, options={"model": options})
    return build_token2wav(stage, "cpu", 8, lambda note, fraction: None)


@cache
def usual():
    return built()


def codes_of(length, seed=1):
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def expected(length, voice="Chelsie", seed=reference.SEED, **changes):
    """`Qwen2_5OmniToken2WavModel.forward` after `torch.manual_seed`."""
    whole = reference.model()
    speaker = whole.speaker_map[voice]
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        sound = whole.token2wav(
            codes_of(length)[None],
            conditioning=speaker["cond"],
            reference_mel=speaker["ref_mel"],
            **changes,
        ).reshape(-1)
    assert float(sound.square().mean().sqrt()) > LOUD_RMS
    return sound


def begin(model, *, voice=0, seed=reference.SEED, streamed=False, **changes):
    settings = SpeechSettings(voice=voice, seed=seed, streamed=streamed, **changes)
    start = StageData(modality=Modality.TOKENS, fields={SPEECH: settings})
    return model.begin_with("key", start)


def pieces_of(model, stream, codes, piece=PIECE):
    pieces = []
    for start in range(0, len(codes), piece):
        more = codes[start : start + piece]
        pieces += model.decode([stream], more[None, :, None], [len(more)])
    return [*pieces, model.finish(stream)]


def worst(ours, theirs):
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-001")
@pytest.mark.parametrize("length", LENGTHS)
def test_one_pass_is_the_librarys(length):
    sound = torch.cat(pieces_of(usual(), begin(usual()), codes_of(length)))
    assert worst(sound, expected(length)) <= ONE_PASS


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-001")
@pytest.mark.parametrize(
    "changes",
    [{"num_steps": 4}, {"guidance_scale": 0.0}, {"sway_coefficient": None}],
)
def test_what_a_request_may_change_is_the_librarys(changes):
    sound = torch.cat(pieces_of(usual(), begin(usual(), **changes), codes_of(12)))
    assert worst(sound, expected(12, **changes)) <= ONE_PASS
    assert worst(sound, expected(12)) > 1e-3


def test_another_voice_seed_or_code_is_noticed():
    wrong = [
        (begin(usual(), voice=1), codes_of(37)),
        (begin(usual(), seed=8), codes_of(37)),
        (begin(usual()), codes_of(37).roll(1)),
    ]
    for stream, codes in wrong:
        assert worst(torch.cat(pieces_of(usual(), stream, codes)), expected(37)) > 1e-2
    other = torch.cat(pieces_of(usual(), begin(usual(), voice=1), codes_of(37)))
    assert worst(other, expected(37, "Ethan")) <= ONE_PASS


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-005")
@pytest.mark.parametrize("piece", [4, PIECE, 200])
def test_chunks_come_close_to_one_pass(piece):
    stream = begin(usual(), chunked=True)
    pieces = pieces_of(usual(), stream, codes_of(151), piece)
    assert piece == 200 or sum(len(one) > 0 for one in pieces) > 4
    assert worst(torch.cat(pieces), expected(151)) <= CHUNKS


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-005")
def test_more_lookahead_comes_closer_until_it_is_one_pass():
    deviations = []
    for lookahead in (0, 1, 2, 20):
        model = built(lookahead_blocks=lookahead)
        sound = torch.cat(pieces_of(model, begin(model, chunked=True), codes_of(90)))
        deviations.append(worst(sound, expected(90)))
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[0] > 4 * deviations[1] > 16 * deviations[2]
    assert deviations[3] <= ONE_PASS


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-005")
def test_the_past_is_exact():
    """Where no block sees the one behind it, chunks are one pass."""
    model = built(lookahead_blocks=0)
    for block in model.module.code2wav_dit_model.transformer_blocks:
        block.look_ahead_block = 0
    one_pass = torch.cat(pieces_of(model, begin(model), codes_of(80)))
    stream = begin(model, chunked=True)
    assert worst(torch.cat(pieces_of(model, stream, codes_of(80))), one_pass) <= ROUNDED
    forgetful = begin(model, chunked=True)
    first = model.decode([forgetful], codes_of(80)[None, :24, None], [24])
    forgetful.spoken = replace(forgetful.spoken, states=torch.zeros_like(forgetful.spoken.states))
    rest = model.decode([forgetful], codes_of(80)[None, 24:, None], [56])
    sound = torch.cat([*first, *rest, model.finish(forgetful)])
    assert worst(sound, one_pass) > 1e-2


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-005")
def test_where_chunks_meet_there_is_no_seam():
    """Steps from sample to sample are as large there as anywhere, and the vocoder sees all it can
    reach: with less, they are not what one pass makes of the same spectrogram."""
    pieces = pieces_of(usual(), begin(usual(), chunked=True), codes_of(151))
    sound, theirs = torch.cat(pieces), expected(151)
    edges = torch.tensor([len(one) for one in pieces]).cumsum(0)
    edges = [int(edge) for edge in edges.unique() if 0 < edge < len(sound)]
    assert len(edges) >= 4
    ours = sound.diff()[[edge - 1 for edge in edges]]
    assert torch.allclose(ours, theirs.diff()[[edge - 1 for edge in edges]], atol=CHUNKS)
    near = built(vocoder_context_frames=3, lookahead_blocks=2)
    cut = torch.cat(pieces_of(near, begin(near, chunked=True), codes_of(151)))
    assert worst(cut, theirs) > 10 * CHUNKS


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-002")
def test_streams_in_one_call_equal_each_alone():
    model, lengths = usual(), (151, 100, 140)
    quick = {"chunked": True, "num_steps": 4}
    streams = [begin(model, voice=index % 2, seed=index, **quick) for index in range(3)]
    sounds: list[list[torch.Tensor]] = [[] for _ in streams]
    for start in range(0, max(lengths), PIECE):
        codes = torch.zeros(3, PIECE, 1, dtype=torch.int64)
        counts = []
        for index, length in enumerate(lengths):
            more = codes_of(length, index)[start : start + PIECE]
            codes[index, : len(more), 0] = more
            counts.append(len(more))
        for kept, piece in zip(sounds, model.decode(streams, codes, counts), strict=True):
            kept.append(piece)
    for index, length in enumerate(lengths):
        together = torch.cat([*sounds[index], model.finish(streams[index])])
        alone = begin(model, voice=index % 2, seed=index, **quick)
        separate = torch.cat(pieces_of(model, alone, codes_of(length, index)))
        assert worst(together, separate) <= ONE_PASS


def test_a_failed_call_leaves_a_stream_as_it_was(monkeypatch):
    model = built()
    stream = begin(model, chunked=True, num_steps=4)
    first = model.decode([stream], codes_of(60)[None, :40, None], [40])
    with monkeypatch.context() as patch:
        patch.setattr(model, "_sound", _fails)
        with pytest.raises(MemoryError):
            model.decode([stream], codes_of(60)[None, 40:, None], [20])
    assert stream.frames == 40
    rest = model.decode([stream], codes_of(60)[None, 40:, None], [20])
    sound = torch.cat([*first, *rest, model.finish(stream)])
    again = begin(model, chunked=True, num_steps=4)
    whole = torch.cat(pieces_of(model, again, codes_of(60), 20))
    assert worst(sound, whole) <= ONE_PASS


def _fails(*args, **kwargs):
    raise MemoryError


def test_a_long_pass_can_be_stopped_between_evaluations():
    model, calls = built(), []

    def stop_at_the_third():
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    model.between = stop_at_the_third
    with pytest.raises(InterruptedError):
        pieces_of(model, begin(model), codes_of(12))
    assert len(calls) == 3
    assert isinstance(model, TakesLong)


def test_an_end_makes_no_sound():
    end = reference.end_ids()[1]
    codes = torch.cat((codes_of(12), torch.tensor([end])))
    sound = torch.cat(pieces_of(usual(), begin(usual()), codes))
    assert worst(sound, expected(12)) <= ONE_PASS
    assert not len(torch.cat(pieces_of(usual(), begin(usual()), torch.tensor([end]))))


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-005")
def test_who_gets_chunks():
    assert begin(usual(), streamed=True).chunked
    assert not begin(usual(), streamed=False).chunked
    assert begin(usual(), streamed=False, chunked=True).chunked
    assert not begin(built(chunked=False), streamed=True).chunked


def test_the_vocoder_reaches_no_further_than_is_said():
    vocoder = reference.model().token2wav.code2wav_bigvgan_model
    reach, middle = reach_frames(vocoder), 60
    mel = torch.randn(1, 80, 2 * middle, generator=torch.Generator().manual_seed(0))
    other = mel.clone()
    other[..., middle] += 1
    with torch.inference_mode():
        changed = (vocoder(mel) != vocoder(other)).nonzero().flatten() // 240
    assert middle - reach <= int(changed.min()) < middle < int(changed.max()) <= middle + reach


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_block": 1}, "chunk_blocks"),
        ({"chunk_blocks": 0}, "at least 1"),
        ({"chunked": "yes"}, "true or false"),
        ({"lookahead_blocks": True}, "at least 0"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        built(**options)


def test_a_file_of_voices_that_is_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no spk_dict\.pt"):
        read_voices(tmp_path)
    (tmp_path / "spk_dict.pt").write_bytes(b"no voices")
    with pytest.raises(CheckpointError, match="holds no voices"):
        read_voices(tmp_path)
    torch.save({"a": print}, tmp_path / "spk_dict.pt")
    with pytest.raises(CheckpointError, match="holds no voices"):
        read_voices(tmp_path)


def test_it_is_a_generation_stage():
    stage = pipeline_config({}).stages[TOKEN2WAV]
    assert stage.execution_type is ExecutionType.LLM_GENERATION
    assert stage.output_modality is Modality.AUDIO
