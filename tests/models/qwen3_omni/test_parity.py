"""Thinker and talker, each by hand, against `Qwen3OmniMoeForConditionalGeneration.generate`."""

from __future__ import annotations

import pytest

from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.models.qwen3_omni.thinker import TALKER_STATE
from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.hand_loop import HandLoop
from tests.models.qwen3_omni.requests import stage_data, talker_model, thinker_model

GREEDY = OmniTokenSamplingParams(temperature=0.0)
WHOLE, SMALL = 10_000, 7
"""Tokens a chunk; pictures are cut by the small one."""
ROW = 3


def think(name, chunk, before=None):
    """The thinker's loop after `MAX_TOKENS` tokens, and its sequence."""
    loop = HandLoop(thinker_model(), 8)
    prompt = loop.model.prepare(stage_data(reference.CASES[name]), GREEDY)
    sequence = loop.begin(prompt, GREEDY, ROW)
    if before is not None:
        before(sequence)
    loop.prefill(sequence, chunk)
    while len(sequence.token_ids) < len(prompt.token_ids) + reference.MAX_TOKENS:
        sequence.token_ids += loop.step([sequence], [])
    return loop, sequence


def generated(sequence):
    return sequence.token_ids[len(sequence.prompt.token_ids) :]


def first_output(loop, sequence):
    return StageData(
        modality=Modality.TEXT,
        fields={
            "prompt_token_ids": sequence.prompt.token_ids,
            "token_ids": generated(sequence)[:1],
        },
        tensors=loop.prompt_payload(sequence),
    )


def begin_talking(loop, thought, row=ROW, chunk=WHOLE, params=GREEDY):
    prompt = talker_model().prepare(first_output(*thought), params)
    talker = HandLoop(talker_model(), 8) if loop is None else loop
    sequence = talker.begin(prompt, params, row)
    talker.prefill(sequence, chunk)
    for token in generated(thought[1])[1:]:
        data = StageData(modality=Modality.TEXT, fields={"token_ids": [token]})
        talker.model.append(sequence, data)
    talker.model.finish_input(sequence)
    return talker, sequence


def frame_of(talker, sequence):
    import torch

    return talker.model.step_payload(torch.tensor([sequence.row]))["codes"][0].clone()


def talk(talker, sequence, frames=reference.MAX_FRAMES - 1):
    """codes (frames, groups) of the next decode steps."""
    import torch

    made = []
    for _ in range(frames):
        sequence.token_ids += talker.step([sequence], [])
        made.append(frame_of(talker, sequence))
    return torch.stack(made)


@pytest.mark.invariant("QWEN-OMNI-INV-001")
@pytest.mark.parametrize("name", reference.CASES)
def test_text_and_codes_equal_generate(name):
    import torch

    expected = reference.expected(name)
    assert len(set(expected.text_ids)) > 1
    assert len(expected.codes.unique()) > 4
    for chunk in (WHOLE, SMALL):
        thought = think(name, chunk)
        assert thought[1].prompt.token_ids == expected.prompt_ids
        assert generated(thought[1]) == expected.text_ids
        codes = talk(*begin_talking(None, thought, chunk=chunk))
        assert torch.equal(codes, expected.codes)


@pytest.mark.invariant("QWEN-OMNI-INV-001")
def test_other_voices_speak_otherwise():
    import torch

    expected = reference.expected("text", "chelsie")
    params = OmniTokenSamplingParams(temperature=0.0, extra_args={"voice": "Chelsie"})
    codes = talk(*begin_talking(None, think("text", WHOLE), params=params))
    assert torch.equal(codes, expected.codes)
    assert not torch.equal(codes, reference.expected("text").codes)


def prompt_states(name, chunk, before=None):
    """Logits (P, V) and the talker's states (P, hidden) of a prompt: ours, and transformers'."""
    import torch

    loop, sequence = think(name, chunk, before)
    kept = loop.kept(sequence)
    with torch.inference_mode():
        ours = loop.model.logits(kept["hidden"]), kept[TALKER_STATE]
        extra = {"use_audio_in_video": True} if reference.CASES[name].sound_in_video else {}
        inputs = reference.processed(reference.CASES[name])
        output = reference.model().thinker(**inputs, **extra, output_hidden_states=True)
    layer = reference.model().config.talker_config.accept_hidden_layer
    return ours, (output.logits[0], output.hidden_states[layer][0])


def worst(ours, theirs):
    """The largest deviation, as a fraction of the largest value."""
    return max(
        float((mine - their).abs().max() / their.abs().max())
        for mine, their in zip(ours, theirs, strict=True)
    )


@pytest.mark.invariant("QWEN-OMNI-INV-001")
@pytest.mark.parametrize("name", ["image", "video with sound", "everything"])
@pytest.mark.parametrize("chunk", [WHOLE, SMALL])
def test_logits_and_states_of_prompts_equal_the_models(name, chunk):
    ours, theirs = prompt_states(name, chunk)
    assert all(float(their.std()) > 0.1 for their in theirs)
    assert worst(ours, theirs) < 1e-5


def test_a_wrong_picture_is_noticed():
    def spoil(sequence):
        features = sequence.media[0]
        sequence.media[0] = features._replace(embeds=features.embeds.flip(0))

    assert worst(*prompt_states("image", WHOLE, spoil)) > 1e-3


def test_missing_deepstack_features_are_noticed():
    def spoil(sequence):
        features = sequence.media[0]
        layers = tuple(0 * layer for layer in features.deepstack)
        sequence.media[0] = features._replace(deepstack=layers)

    assert worst(*prompt_states("image", WHOLE, spoil)) > 1e-3


def test_rounded_positions_of_a_video_are_noticed():
    def spoil(sequence):
        positions = sequence.prompt.own["positions"]
        assert positions.fraction
        positions.values = positions.values.floor()

    assert worst(*prompt_states("video", WHOLE, spoil)) > 1e-3


def test_text_that_is_a_step_early_is_noticed():
    """By the codes of some of the cases: tiny talkers listen more to themselves."""
    import torch

    def codes(name):
        talker, sequence = begin_talking(None, think(name, WHOLE))
        del sequence.prompt.own["text"].generated[1]
        talker.model.begin(sequence)
        talker.model.finish_input(sequence)
        return talk(talker, sequence)

    names = ("text", "image", "audio")
    assert any(not torch.equal(codes(name), reference.expected(name).codes) for name in names)


def test_the_references_differ():
    texts = {tuple(reference.expected(name).text_ids) for name in reference.CASES}
    assert len(texts) == len(reference.CASES)


@pytest.mark.invariant("QWEN-OMNI-INV-002")
def test_mixed_requests_in_one_batch_equal_each_alone():
    """Talkers at different steps, a prompt's chunk beside them."""
    import torch

    names = ["text", "image", "audio", "video with sound"]
    loop = HandLoop(talker_model(), 8)
    running, made = [], {}
    for row, name in enumerate(names):
        sequence = begin_talking(loop, think(name, WHOLE), row)[1]
        running.append((name, sequence))
        for _ in range(3):
            _step_all(loop, running, made)
    while any(len(frames) < reference.MAX_FRAMES - 1 for frames in made.values()):
        _step_all(loop, running, made)
    for name in names:
        codes = torch.stack(made[name][: reference.MAX_FRAMES - 1])
        assert torch.equal(codes, reference.expected(name).codes), name


def _step_all(loop, running, made):
    tokens = loop.step([sequence for _, sequence in running], [])
    for (name, sequence), token in zip(running, tokens, strict=True):
        made.setdefault(name, []).append(frame_of(loop, sequence))
        sequence.token_ids.append(token)


@pytest.mark.invariant("QWEN-OMNI-INV-003")
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("overran", [False, True])
def test_a_preempted_talker_goes_on_with_the_frames_it_would_have_made(moves, overran):
    import torch

    expected = reference.expected("image and audio").codes
    talker, sequence = begin_talking(None, think("image and audio", WHOLE))
    assert torch.equal(talk(talker, sequence, 6), expected[:6])
    if overran:  # A step was in flight whose token is dropped.
        talker.step([sequence], [])
    if moves:
        talker.model.release(sequence)
        sequence.own.clear()
        sequence.row = 5
    talker.model.begin(sequence)
    if moves:
        talker.model.finish_input(sequence)
    talker.prefill(sequence, SMALL)
    again = frame_of(talker, sequence)
    assert torch.equal(again, expected[6])
    assert torch.equal(talk(talker, sequence, 5), expected[7:12])


@pytest.mark.invariant("QWEN-OMNI-INV-003")
def test_sampled_codes_depend_on_seed_and_step_alone():
    import torch

    params = OmniTokenSamplingParams(temperature=0.9)
    thought = think("text", WHOLE)

    def codes(seed, row):
        loop, sequence = begin_talking(None, thought, row, params=params)
        sequence.seed = seed
        loop.model.begin(sequence)
        return talk(loop, sequence)

    first = codes(7, 1)
    assert torch.equal(first, codes(7, 4))
    assert not torch.equal(first, codes(8, 1))
    assert not torch.equal(first, reference.expected("text").codes)
