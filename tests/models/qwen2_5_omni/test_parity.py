"""Thinker and talker, each by hand, against what `generate` hands from one to the other."""

from __future__ import annotations

import functools

import pytest
import torch

from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.models.qwen2_5_omni.library import opens_speech_of_unpadded_prompts
from omnistage.models.qwen2_5_omni.talker import TalkerModel
from omnistage.models.qwen2_5_omni.thinker import PROMPT_STATES, REPLY_STATES
from tests.models.qwen2_5_omni import reference
from tests.models.qwen2_5_omni.requests import (
    TALKER_PARAMS,
    THINKER_PARAMS,
    stage_data,
    talker_model,
    thinker_model,
)
from tests.models.qwen3_omni.hand_loop import HandLoop

WHOLE, SMALL = 10_000, 7
"""Tokens a chunk; pictures are cut by the small one."""
ROW = 3
CLOSE, FAR = 3e-5, 1e-3


@functools.cache
def told(name):
    """What the library's talker is given: inputs_embeds (P + 2, size) and thinker_reply_part, and
    the logits (P + 2, V) that it makes of them."""
    talker, found = reference.model().talker, []
    forward = talker.forward

    @functools.wraps(forward)
    def listening(*args, **kwargs):
        output = forward(*args, **kwargs)
        if not found:
            found.extend(
                (kwargs["inputs_embeds"][0], kwargs["thinker_reply_part"][0], output.logits[0])
            )
        return output

    talker.forward = listening
    try:
        reference.expected.__wrapped__(name)
    finally:
        del talker.forward
    return [value.detach() for value in found]


def think(name, chunk=WHOLE, before=lambda sequence: None):
    """What the thinker says to the talker: the prompt's payload and those of its decode steps."""
    loop = HandLoop(thinker_model(), 8)
    prompt = loop.model.prepare(stage_data(reference.CASES[name]), THINKER_PARAMS)
    sequence = loop.begin(prompt, THINKER_PARAMS, ROW)
    before(sequence)
    loop.prefill(sequence, chunk)
    first, replies = loop.prompt_payload(sequence), []
    while len(sequence.token_ids) < len(prompt.token_ids) + reference.MAX_TOKENS:
        sequence.token_ids += loop.step([sequence], [])
        replies.append(loop.model.step_payload(torch.tensor([ROW]))[REPLY_STATES].clone())
    data = StageData(
        modality=Modality.TEXT,
        fields={"prompt_token_ids": prompt.token_ids, "token_ids": [0]},
        tensors=first,
    )
    return data, replies, sequence.token_ids[len(prompt.token_ids) :]


def listen(data, replies, chunk=WHOLE, complete=True):
    loop = HandLoop(talker_model(), 8)
    sequence = loop.begin(loop.model.prepare(data, TALKER_PARAMS), TALKER_PARAMS, ROW)
    for state in replies:
        loop.model.append(
            sequence,
            StageData(modality=Modality.TEXT, fields={}, tensors={REPLY_STATES: state}),
        )
    if complete:
        loop.model.finish_input(sequence)
    loop.prefill(sequence, chunk)
    return loop, sequence


def worst(ours, theirs):
    """The largest deviation, as a fraction of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def logits_of(loop, sequence):
    """Of every position, before any is forbidden."""
    return loop.model.module.codec_head(loop.kept(sequence)["hidden"])


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-001")
@pytest.mark.parametrize("name", ["image", "video with sound", "everything"])
@pytest.mark.parametrize("chunk", [WHOLE, SMALL])
def test_what_the_talker_is_told_and_makes_of_it_equals_generate(name, chunk):
    embeds, reply, logits = told(name)
    assert min(float(value.std()) for value in (embeds, reply, logits)) > 0.1
    data, replies, text_ids = think(name, chunk)
    assert text_ids == reference.expected(name).text_ids
    loop, sequence = listen(data, replies, chunk)
    assert worst(sequence.own["prompt_embeds"], embeds) < CLOSE
    assert worst(loop.model._rows._states[ROW, : len(reply)], reply) < CLOSE
    assert worst(logits_of(loop, sequence), logits) < CLOSE


def test_a_wrong_picture_is_noticed():
    def spoil(sequence):
        features = sequence.media[0]
        sequence.media[0] = features._replace(embeds=features.embeds.flip(0))

    data, _, _ = think("image", before=spoil)
    theirs = told("image")[0][:-2]
    assert worst(data.tensors[PROMPT_STATES], theirs) > FAR


def test_a_picture_that_is_not_silenced_is_noticed():
    def spoil(sequence):
        sequence.prompt.own["media_places"] = sequence.prompt.own["media_places"][:-1]

    data, _, _ = think("image", before=spoil)
    assert worst(data.tensors[PROMPT_STATES], told("image")[0][:-2]) > FAR


def test_a_reply_that_lacks_a_state_is_noticed():
    data, replies, _ = think("text")
    loop, _ = listen(data, replies[:-1])
    reply = told("text")[1]
    assert worst(loop.model._rows._states[ROW, : len(reply)], reply) > FAR


def test_an_answer_without_a_state_ends_at_once():
    data, _, _ = think("text")
    loop, sequence = listen(data, [])
    config = loop.model.module.config
    end = loop.model._text_embeds[config.tts_text_end_token_id]
    if opens_speech_of_unpadded_prompts():
        end = end + loop.model.module.model.embed_tokens.weight[config.tts_codec_start_token_id]
    assert torch.equal(sequence.own["prompt_embeds"][-1], end)
    assert torch.equal(loop.model._rows._states[ROW, 0], loop.model._rows.pad)


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-003")
@pytest.mark.parametrize("moves", [False, True])
def test_a_preempted_talker_goes_on_with_the_same_codes(moves):
    data, replies, _ = think("image and audio")
    loop, sequence = listen(data, replies)
    for _ in range(12):
        sequence.token_ids += loop.step([sequence], [])
    wanted = list(sequence.token_ids)
    del sequence.token_ids[-5:]
    if moves:
        loop.model.release(sequence)
        sequence.own.clear()
        sequence.row = 5
    loop.model.begin(sequence)
    loop.prefill(sequence, SMALL)
    while len(sequence.token_ids) < len(wanted):
        sequence.token_ids += loop.step([sequence], [])
    assert sequence.token_ids == wanted
    assert len(set(wanted[-10:])) > 3


def test_a_talker_never_makes_what_has_no_sound():
    """`transformers` fails on an id that its vocoder lacks."""
    model = talker_model()
    config = model.module.config
    few = TalkerModel(
        model.module,
        model._text_embeds,
        model._prompts,
        rows=3,
        max_model_len=64,
        num_codes=100,
    )
    logits = few.logits(torch.randn(4, config.hidden_size))
    spoken = torch.isfinite(logits[0]).nonzero().flatten().tolist()
    assert spoken == [*range(100), *sorted(few.eos_token_ids)]
