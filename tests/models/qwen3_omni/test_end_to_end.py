"""The whole pipeline in one process against `transformers`: text, codes and sound."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from omnistage.contracts.sampling import GenericParams, OmniTokenSamplingParams
from tests.checkpoints import checkpoint
from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.requests import omni_prompt

LOUD_RMS = 0.05
WORST_OF_PEAK = 1e-5
THINKER_STAGE, TALKER_STAGE = 0, 1
ROUNDS = 5
THINKER = OmniTokenSamplingParams(temperature=0.0, max_tokens=reference.MAX_TOKENS, ignore_eos=True)
TALKER = OmniTokenSamplingParams(
    temperature=0.0, repetition_penalty=1.0, max_tokens=reference.MAX_FRAMES
)
PARAMS = [THINKER, TALKER, GenericParams()]

SETTINGS = {
    "as it comes": {},
    "chunks that cut media": {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 16},
    "no prefix cache, no async chunk": {"enable_prefix_caching": False, "async_chunk": False},
}


@pytest.fixture(scope="module", params=SETTINGS)
def omni(request):
    from omnistage import Omni

    settings = {"kv_cache_gib": 0.05} | SETTINGS[request.param]
    with Omni(str(checkpoint(reference.CHECKPOINT)), process="inline", **settings) as found:
        yield found


def assert_as_expected(output, name, speaker="ethan"):
    expected = reference.expected(name, speaker)
    assert output.error is None, (name, output.error, output.error.detail)
    assert output.outputs[0].token_ids == expected.text_ids, name
    assert_sounds_like(output, expected.waveform, name)


def assert_sounds_like(output, waveform, name):
    import numpy as np

    theirs = waveform.numpy()
    assert float(np.sqrt(np.square(theirs).mean())) >= LOUD_RMS, name
    assert output.audio.shape == theirs.shape, name
    worst = float(np.abs(output.audio - theirs).max())
    assert worst <= WORST_OF_PEAK * float(np.abs(theirs).max()), (name, worst)


@pytest.mark.invariant("QWEN-OMNI-INV-001")
@pytest.mark.invariant("QWEN-OMNI-INV-002")
def test_all_kinds_of_input_at_once_equal_generate_twice(omni):
    """The second time prompts come from the prefix cache where there is one."""
    prompts = [omni_prompt(case) for case in reference.CASES.values()]
    for _ in range(2):
        outputs = omni.generate(prompts, sampling_params_list=PARAMS, use_tqdm=False)
        for name, output in zip(reference.CASES, outputs, strict=True):
            assert_as_expected(output, name)
    hits = token_stats(omni, THINKER_STAGE)["prefix_hits"]
    cached = omni.config.stages[THINKER_STAGE].enable_prefix_caching
    assert hits > 20 if cached else hits == 0


@pytest.mark.invariant("QWEN-OMNI-INV-003")
def test_preempted_thinkers_and_talkers_make_the_same():
    from omnistage import Omni

    names = ["text", "image", "audio", "image and audio"] * 3
    few_blocks = {
        THINKER_STAGE: {"kv_cache_gib": 200 * 640 / 2**30},
        TALKER_STAGE: {"kv_cache_gib": 160 * 384 / 2**30},
    }
    with Omni(
        str(checkpoint(reference.CHECKPOINT)),
        process="inline",
        max_num_seqs=4,
        max_num_batched_tokens=48,
        block_size=4,
        max_model_len=120,
        stage_overrides=few_blocks,
    ) as omni:
        prompts = [omni_prompt(reference.CASES[name]) for name in names]
        for _ in range(ROUNDS):  # Who is there together depends on the machine.
            outputs = omni.generate(prompts, sampling_params_list=PARAMS, use_tqdm=False)
            for name, output in zip(names, outputs, strict=True):
                assert_as_expected(output, name)
            preempted = [token_stats(omni, stage)["preemptions"] for stage in few_blocks]
            if all(preempted):
                break
        assert all(preempted), preempted


def token_stats(omni, stage):
    return omni._run(omni._engine.call_stage(stage, "token_stats"))


def test_text_alone_makes_no_sound(omni):
    case = omni_prompt(reference.CASES["image"])
    (output,) = omni.generate(
        case, sampling_params_list=PARAMS, output_modalities=["text"], use_tqdm=False
    )
    assert output.outputs[0].token_ids == reference.expected("image").text_ids
    assert output.audio is None


def test_sampled_speech_follows_from_its_seed(omni):
    import numpy as np

    def speak(*seeds):
        params = [[THINKER, _sampled(seed), GenericParams()] for seed in seeds]
        prompts = [omni_prompt(reference.CASES["text"])] * len(seeds)
        found = [
            omni.generate(prompt, sampling_params_list=one, use_tqdm=False)[0]
            for prompt, one in zip(prompts, params, strict=True)
        ]
        return [output.audio for output in found]

    first, again, other = speak(7, 7, 8)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def _sampled(seed):
    return OmniTokenSamplingParams(
        temperature=0.9, top_k=50, max_tokens=reference.MAX_FRAMES, seed=seed, ignore_eos=True
    )


@pytest.mark.invariant("QWEN-OMNI-INV-001")
def test_a_repetition_penalty_counts_what_the_talker_made(omni):
    penalty = 3.0
    expected = reference.generated(
        reference.processed(reference.CASES["image"]), repetition_penalty=penalty
    )
    assert not expected.codes.equal(reference.expected("image").codes)
    talker = replace(TALKER, repetition_penalty=penalty)
    (output,) = omni.generate(
        omni_prompt(reference.CASES["image"]),
        sampling_params_list=[THINKER, talker, GenericParams()],
        use_tqdm=False,
    )
    assert_sounds_like(output, expected.waveform, "image")


def test_an_answer_of_one_token_is_spoken(omni):
    """`transformers` fails on it."""
    import numpy as np

    first = reference.expected("text").text_ids[0]
    thinker = OmniTokenSamplingParams(temperature=0.0, stop_token_ids=[first])
    (output,) = omni.generate(
        omni_prompt(reference.CASES["text"]),
        sampling_params_list=[thinker, TALKER, GenericParams()],
        use_tqdm=False,
    )
    assert output.error is None
    assert output.outputs[0].token_ids == [first]
    assert np.isfinite(output.audio).all()


def test_an_unknown_voice_is_refused(omni):
    talker = OmniTokenSamplingParams(temperature=0.0, extra_args={"voice": "nobody"})
    (output,) = omni.generate(
        omni_prompt(reference.CASES["text"]),
        sampling_params_list=[THINKER, talker, GenericParams()],
        use_tqdm=False,
    )
    assert output.error_status_code == 400
    assert "'nobody'" in str(output.error)
    assert "ethan" in str(output.error)


def test_media_without_a_place_is_refused(omni):
    prompt = {"prompt": "describe", "multi_modal_data": {"image": [reference.media("image", 0)]}}
    (output,) = omni.generate(prompt, sampling_params_list=PARAMS, use_tqdm=False)
    assert output.error_status_code == 400
    assert "<|image_pad|>" in str(output.error)
