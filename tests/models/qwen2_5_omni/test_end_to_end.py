"""The whole pipeline in one process against `transformers`: text, codes and sound."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from omnistage.contracts.sampling import GenericParams, OmniTokenSamplingParams
from omnistage.models.qwen2_5_omni.library import opens_speech_of_unpadded_prompts
from tests.checkpoints import checkpoint
from tests.models.qwen2_5_omni import reference
from tests.models.qwen2_5_omni.requests import PARAMS, TALKER_PARAMS, THINKER_PARAMS, omni_prompt
from tests.toy.leaks import assert_idle

GUARD_S = 120.0
LOUD_RMS = 0.05
WORST_OF_PEAK = 1e-5
THINKER_STAGE, TALKER_STAGE, TOKEN2WAV_STAGE = 0, 1, 2

SETTINGS = {
    "as it comes": {},
    "chunks that cut media": {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 16},
    "no prefix cache, no async chunk": {"enable_prefix_caching": False, "async_chunk": False},
}
ROUNDS = 5


def opened(**settings):
    from omnistage import Omni

    settings = {"kv_cache_gib": 0.05} | settings
    return Omni(str(checkpoint(reference.CHECKPOINT)), process="inline", **settings)


@pytest.fixture(scope="module", params=SETTINGS)
def omni(request):
    with opened(**SETTINGS[request.param]) as found:
        yield found


def run(omni, names, params=PARAMS, **options):
    prompts = [omni_prompt(reference.CASES[name]) for name in names]
    return omni.generate(prompts, sampling_params_list=params, use_tqdm=False, **options)


def assert_equal(output, expected):
    assert output.error is None, (output.error, output.error.detail)
    assert output.outputs[0].token_ids == expected.text_ids
    theirs = expected.waveform.numpy()
    assert float(np.sqrt(np.square(theirs).mean())) >= LOUD_RMS
    assert output.audio.shape == theirs.shape
    worst = float(np.abs(output.audio - theirs).max())
    assert worst <= WORST_OF_PEAK * float(np.abs(theirs).max())


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-001")
@pytest.mark.invariant("QWEN-OMNI-TWO-INV-002")
def test_all_kinds_of_input_at_once_equal_generate_twice(omni):
    """The second time prompts come from the prefix cache where there is one."""
    for _ in range(2):
        outputs = run(omni, reference.CASES)
        for name, output in zip(reference.CASES, outputs, strict=True):
            assert len(set(reference.expected(name).codes.tolist())) > 4
            assert_equal(output, reference.expected(name))
    hits = token_stats(omni, THINKER_STAGE)["prefix_hits"]
    cached = omni.config.stages[THINKER_STAGE].enable_prefix_caching
    assert hits > 20 if cached else hits == 0


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-003")
def test_preempted_thinkers_and_talkers_make_the_same():
    names = ["text", "image", "audio", "image and audio"] * 3
    few_blocks = {
        THINKER_STAGE: {"kv_cache_gib": 184 * 512 / 2**30},
        TALKER_STAGE: {"kv_cache_gib": 172 * 384 / 2**30},
    }
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 4}
    with opened(**limits, max_model_len=160, stage_overrides=few_blocks) as omni:
        for _ in range(ROUNDS):  # Who is there together depends on the machine.
            for name, output in zip(names, run(omni, names), strict=True):
                assert_equal(output, reference.expected(name))
            preempted = [token_stats(omni, stage)["preemptions"] for stage in few_blocks]
            if all(preempted):
                break
        assert all(preempted), preempted


def token_stats(omni, stage):
    return omni._run(omni._engine.call_stage(stage, "token_stats"))


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-001")
def test_other_voices_and_seeds_sound_otherwise(omni):
    talker = replace(TALKER_PARAMS, extra_args={"voice": "ethan"})
    params = [THINKER_PARAMS, talker, GenericParams()]
    (output,) = run(omni, ["image"], params)
    assert_equal(output, reference.expected("image", "Ethan"))
    (other,) = run(omni, ["image"], [THINKER_PARAMS, replace(talker, seed=8), GenericParams()])
    assert not np.allclose(other.audio, output.audio, atol=1e-2)


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-004")
def test_speech_that_is_opened_equals_generate_where_it_opens_it():
    """Newer versions of the library do so where there is padding only."""
    always = opens_speech_of_unpadded_prompts()
    names = ["text", "image", "image and audio", "media in another order", "video with sound"]
    options = {TALKER_STAGE: {"options": {"model": {"opens_speech": True}}}}
    with opened(stage_overrides=options) as omni:
        for name, output in zip(names, run(omni, names), strict=True):
            expected = reference.expected(name, padded=not always)
            same = np.array_equal(expected.codes, reference.expected(name).codes)
            assert same == always
            assert_equal(output, expected)


def test_text_alone_makes_no_sound(omni):
    (output,) = run(omni, ["image"], output_modalities=["text"])
    assert output.outputs[0].token_ids == reference.expected("image").text_ids
    assert output.audio is None


def test_an_answer_of_one_token_is_spoken(omni):
    """`transformers` fails on it."""
    first = reference.expected("text").text_ids[0]
    thinker = OmniTokenSamplingParams(temperature=0.0, stop_token_ids=[first])
    (output,) = run(omni, ["text"], [thinker, TALKER_PARAMS, GenericParams()])
    assert output.error is None
    assert output.outputs[0].token_ids == [first]
    assert len(output.audio)
    assert np.isfinite(output.audio).all()


@pytest.mark.parametrize(
    ("talker", "token2wav", "words"),
    [
        ({"extra_args": {"voice": "nobody"}}, {}, ["'nobody'", "Chelsie"]),
        ({"extra_args": {"voise": "Ethan"}}, {}, ["'voise'", "voice"]),
        ({"max_tokens": 5000}, {}, ["5000", "4096"]),
        ({}, {"num_steps": 1}, ["num_steps", "from 2"]),
        ({}, {"guidance": 1.0}, ["'guidance'", "guidance_scale"]),
        ({}, {"chunked": 1}, ["chunked", "true or false"]),
    ],
)
def test_what_cannot_be_done_is_refused(omni, talker, token2wav, words):
    params = [
        THINKER_PARAMS,
        replace(TALKER_PARAMS, **talker),
        GenericParams(extra_args=token2wav),
    ]
    (output,) = run(omni, ["text"], params)
    assert output.error_status_code == 400
    assert all(word in str(output.error) for word in words), output.error


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-005")
async def test_sound_streams_in_chunks_close_to_one_pass():
    from omnistage import AsyncOmni

    name = max(reference.CASES, key=lambda name: len(reference.expected(name).codes))
    expected = reference.expected(name)
    chunk = {TOKEN2WAV_STAGE: {"options": {"model": {"chunk_blocks": 1}}}}
    folder = str(checkpoint(reference.CHECKPOINT))
    async with AsyncOmni(
        folder, process="inline", kv_cache_gib=0.05, stage_overrides=chunk
    ) as engine:
        events = engine.generate(omni_prompt(reference.CASES[name]), sampling_params_list=PARAMS)
        pieces = [event.tensors["audio"] async for event in events if "audio" in event.tensors]
    assert len(pieces) > 1
    assert all(len(piece) for piece in pieces)
    sound, theirs = np.concatenate(pieces), expected.waveform.numpy()
    assert sound.shape == theirs.shape
    assert np.abs(sound - theirs).max() <= 0.02 * np.abs(theirs).max()


async def test_an_abort_stops_a_pass_that_is_under_way(monkeypatch):
    from omnistage import AsyncOmni
    from omnistage.models.qwen2_5_omni.spectrum import Velocity

    evaluations, first = [], asyncio.Event()
    loop, evaluate = asyncio.get_running_loop(), Velocity.__call__

    def counted(self, time, state):
        evaluations.append(1)
        loop.call_soon_threadsafe(first.set)
        return evaluate(self, time, state)

    monkeypatch.setattr(Velocity, "__call__", counted)
    wishes = GenericParams(extra_args={"chunked": False, "num_steps": 100})
    folder = str(checkpoint(reference.CHECKPOINT))
    async with AsyncOmni(folder, process="inline", kv_cache_gib=0.05) as engine:
        events = engine.generate(
            omni_prompt(reference.CASES["image"]),
            sampling_params_list=[THINKER_PARAMS, TALKER_PARAMS, wishes],
        )
        reader = asyncio.create_task(_read(events))
        await asyncio.wait_for(first.wait(), GUARD_S)
        reader.cancel()
        await asyncio.wait({reader})
        await assert_idle(engine)
        assert 0 < len(evaluations) < 4 * 99
        again = engine.generate(omni_prompt(reference.CASES["text"]), sampling_params_list=PARAMS)
        assert (await _read(again))[-1].finished


async def _read(events):
    return [event async for event in events]
