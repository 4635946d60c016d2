"""Prompts of the thinker and of the talker, also those that people get wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.models.qwen3_omni.talker_prompt import AnswerText
from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.requests import stage_data, talker_model, thinker_model
from tests.models.qwen3_omni.test_parity import GREEDY, WHOLE, begin_talking, talk

END = -1


def prepare(data):
    return thinker_model().prepare(data, GREEDY)


def text_data(**fields):
    tensors = fields.pop("tensors", {})
    return StageData(modality=Modality.TEXT, fields=fields, tensors=tensors)


def test_media_are_processed_once_and_anew_when_they_change(monkeypatch):
    inner = thinker_model().inputs._processor
    calls = []
    processed = type(inner)._processed
    monkeypatch.setattr(
        type(inner),
        "_processed",
        lambda self, media: calls.append(media.name) or processed(self, media),
    )
    data = stage_data(reference.CASES["everything"])
    for name, array in data.tensors.items():
        data.tensors[name] = array[..., ::-1].copy()  # Media that no other test has prepared.
    first = prepare(data)
    assert sorted(calls) == ["audio 0", "image 0", "video 0"]
    again = prepare(data)
    assert len(calls) == 3
    assert [item.digest for item in again.media] == [item.digest for item in first.media]
    data.fields["video_0_fps"] = 1.0
    changed = prepare(data)
    assert calls[3:] == ["video 0"]
    differing = [
        a.kind for a, b in zip(first.media, changed.media, strict=True) if a.digest != b.digest
    ]
    assert differing == ["video"]


def test_spans_cover_exactly_the_places_of_media():
    prompt = prepare(stage_data(reference.CASES["video with sound"]))
    config = thinker_model().module.config
    tokens = {"video": config.video_token_id, "audio": config.audio_token_id}
    assert [item.kind for item in prompt.media] == ["video", "audio"]
    for item in prompt.media:
        assert len(item.spans) > 1
        found = [place for span in item.spans for place in range(*span)]
        assert found == [
            p for p, token in enumerate(prompt.token_ids) if token == tokens[item.kind]
        ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "<|image_pad|>"}, "1 placeholders for image (<|image_pad|>), and 0 items"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "a", "mm_processor_kwargs": {"max_pixels": 9}}, "'max_pixels' is not taken"),
        ({"prompt_token_ids": [10**6]}, "prompt_token_ids[0] is 1000000"),
        ({"prompt": "the cat " * 4096}, "max_model_len is 4096"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "index": 2}]}]},
            "a message names image 2; 0 are given",
        ),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role is 'robot'"),
    ],
)
def test_wrong_prompts_are_refused(fields, words):
    with pytest.raises(InvalidRequestError) as caught:
        prepare(text_data(**fields))
    assert words in str(caught.value)


def test_a_video_without_its_sound_is_refused():
    data = stage_data(reference.CASES["video with sound"])
    del data.tensors["audio_0"]
    with pytest.raises(InvalidRequestError, match="video 0 has no sound"):
        prepare(data)


def test_a_videos_own_sound_is_taken():
    data = stage_data(reference.CASES["video with sound"])
    expected = prepare(data).token_ids
    data.tensors["video_0_audio"] = data.tensors.pop("audio_0")
    assert prepare(data).token_ids == expected


def test_an_image_that_the_processor_refuses_is_the_users_fault():
    import numpy as np

    data = stage_data(reference.CASES["image"])
    data.tensors["image_0"] = np.zeros((1, 4000, 3), np.uint8)
    with pytest.raises(InvalidRequestError, match="processor refuses image 0"):
        prepare(data)


def test_text_behind_the_first_is_added_step_by_step_and_ends_before_the_last():
    text = AnswerText([], [1, 2, 3])
    assert text.trailing(0, END) == [2, 3]
    done = replace(text, complete=True)
    assert done.trailing(0, END) == [2, END]
    assert done.trailing(1, END) == [END]
    assert replace(text, tail=[8, 9], complete=True).trailing(0, END) == [9, 1, 2, END]
    assert AnswerText([], [1], complete=True).trailing(0, END) == [END]


def talker_data(prompt_ids, token_ids):
    fields = {"prompt_token_ids": prompt_ids, "token_ids": token_ids}
    return StageData(modality=Modality.TEXT, fields=fields)


def test_speech_needs_an_answer_to_speak():
    with pytest.raises(InvalidRequestError, match="opens the assistant's turn"):
        talker_model().prepare(talker_data([1, 2, 3, 4], [5]), GREEDY)


@pytest.mark.parametrize("option", ["voice", "speaker"])
def test_unknown_voices_and_options_are_refused(option):
    prompt_ids = reference.expected("text").prompt_ids
    unknown = OmniTokenSamplingParams(extra_args={option: "nobody"})
    with pytest.raises(InvalidRequestError, match="'nobody' is none of aiden, chelsie, ethan"):
        talker_model().prepare(talker_data(prompt_ids, [5]), unknown)
    wrong = OmniTokenSamplingParams(extra_args={"voise": "ethan"})
    with pytest.raises(InvalidRequestError, match=r"no option 'voise'.*voice"):
        talker_model().prepare(talker_data(prompt_ids, [5]), wrong)


def test_an_answer_without_a_word_is_an_end_mark():
    config = reference.model().config
    prompt_ids = reference.expected("text").prompt_ids
    (end,) = talker_model()._prompts.thinker_eos_ids
    prompt = talker_model().prepare(talker_data(prompt_ids, [end]), GREEDY)
    assert prompt.own["text_ids"][-1] == config.tts_eos_token_id


@pytest.mark.invariant("QWEN-OMNI-INV-001")
def test_a_begun_answer_is_spoken_from_its_beginning():
    import torch

    from tests.models.qwen3_omni.hand_loop import HandLoop

    ids = reference.expected("text").prompt_ids
    ids = ids + reference.processor().tokenizer("the cat and dog")["input_ids"]
    expected = reference.generated(reference.prompt_inputs(ids))
    loop = HandLoop(thinker_model(), 8)
    sequence = loop.begin(prepare(text_data(prompt_token_ids=ids)), GREEDY, 2)
    loop.prefill(sequence)
    while len(sequence.token_ids) < len(ids) + reference.MAX_TOKENS:
        sequence.token_ids += loop.step([sequence], [])
    assert sequence.token_ids[len(ids) :] == expected.text_ids
    talker, speech = begin_talking(None, (loop, sequence), chunk=WHOLE)
    assert speech.prompt.conditioning_offset < 0
    assert torch.equal(talk(talker, speech), expected.codes)
