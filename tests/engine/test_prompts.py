"""Prompts of token pipelines, and the answers that come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import FinishReason, OmniRequestOutput
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.engine.admission import make_request
from omnistage.engine.prompts import prompt_data
from omnistage.engine.results import ResultCollector, materialize
from tests.api.fake_text_engine import text_config

PICTURE = Image.new("RGB", (6, 4))
SOUND = (np.zeros(8, np.float32), 16_000)


def test_a_list_of_messages_is_a_prompt_with_its_media() -> None:
    parts = [
        {"type": "text", "text": "what is"},
        {"type": "image", "image": PICTURE},
        {"type": "audio", "audio": SOUND},
        {"type": "image", "image": PICTURE},
    ]
    data = prompt_data([{"role": "system", "content": "x"}, {"role": "user", "content": parts}])
    assert data.fields["messages"][0] == {"role": "system", "content": "x"}
    assert data.fields["messages"][1]["content"] == [
        {"type": "text", "text": "what is"},
        {"type": "image", "index": 0},
        {"type": "audio", "index": 0},
        {"type": "image", "index": 1},
    ]
    assert set(data.tensors) == {"image_0", "image_1", "audio_0"}
    assert data.fields["audio_0_rate"] == 16_000


def test_parts_without_an_item_take_those_of_multi_modal_data_in_turn() -> None:
    parts = [{"type": "image"}, {"type": "image"}, {"type": "image", "index": 0}]
    data = prompt_data(
        {
            "messages": [{"role": "user", "content": parts}],
            "multi_modal_data": {"image": [PICTURE, PICTURE]},
        }
    )
    assert [part["index"] for part in data.fields["messages"][0]["content"]] == [0, 1, 0]


def test_token_ids_and_options_travel_as_plain_values() -> None:
    data = prompt_data({"prompt_token_ids": np.arange(3), "mm_processor_kwargs": {"fps": 1}})  # type: ignore[typeddict-item]
    assert data.fields == {"prompt_token_ids": [0, 1, 2], "mm_processor_kwargs": {"fps": 1}}
    assert all(type(token) is int for token in data.fields["prompt_token_ids"])


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "a", "messages": [USER]}, "give one"),
        ({"prompt_token_ids": []}, "at least one"),
        ({"prompt_token_ids": [1, -1]}, "whole numbers"),
        ({"prompt_token_ids": [True]}, "whole numbers"),
        ({"prompt_token_ids": 3}, "whole numbers"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "'file'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "there are 0"),
        ({"messages": [USER], "tools": {}}, "type list"),
        ({"messages": [USER], "add_generation_prompt": "yes"}, "type bool"),
    ],
)
def test_a_prompt_that_cannot_be_names_the_fault(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        prompt_data(prompt)


def test_the_first_stage_learns_which_outputs_are_wanted() -> None:
    config = text_config(speaks=True)
    everything = make_request(config, "a", None)
    assert everything.inputs.fields["output_modalities"] == ["audio", "text"]
    text = make_request(config, {"prompt": "a", "modalities": ["text"]}, None)
    assert text.inputs.fields["output_modalities"] == ["text"]
    assert text.output_modalities == frozenset({Modality.TEXT})
    with pytest.raises(InvalidRequestError, match="no 'image' output"):
        make_request(config, {"prompt": "a", "modalities": ["image"]}, None)
    with pytest.raises(InvalidRequestError, match="list of names"):
        make_request(config, {"prompt": "a", "modalities": "text"}, None)  # type: ignore[typeddict-item]


def test_texts_in_one_piece_are_asked_for_in_one_piece() -> None:
    config = text_config(speaks=True)
    params = make_request(config, "a", None, delta=False).sampling_params
    kept = [p.delta for p in params if isinstance(p, OmniTokenSamplingParams)]
    assert kept == [False, False]


def event(child: int, text: str, *, final: bool = False, **fields: Any) -> OmniRequestOutput:
    return materialize(
        OmniRequestOutput(
            request_id="r",
            child_index=child,
            modality=Modality.TEXT,
            partial=not final,
            finish_reason=FinishReason.LENGTH if final else None,
            fields={"text": text, "token_ids": [len(text)], **fields},
        )
    )


def sound(value: float, *, final: bool) -> OmniRequestOutput:
    return materialize(
        OmniRequestOutput(
            request_id="r",
            modality=Modality.AUDIO,
            partial=not final,
            finish_reason=FinishReason.STOP if final else None,
            tensors={"audio": np.full(2, value, np.float32)},
            fields={"sample_rate": 24_000},
        )
    )


def test_pieces_of_texts_and_sounds_are_put_together_by_child() -> None:
    collector = ResultCollector("r", "p")
    first = event(1, "b1", logprobs=[{"token": "b1"}])
    assert (first.outputs[0].index, first.outputs[0].text) == (1, "b1")
    for one in (
        event(0, "a"),
        first,
        sound(0.25, final=False),
        event(1, "b2", final=True, stop_reason=7, logprobs=[{"token": "b2"}]),
        event(0, "A", final=True),
        sound(0.5, final=True),
    ):
        collector.add(one)
    result = collector.result()
    zero, one = result.outputs
    assert (zero.text, zero.token_ids, zero.logprobs) == ("aA", [1, 1], None)
    assert (one.text, one.token_ids, one.stop_reason) == ("b1b2", [2, 2], 7)
    assert [entry["token"] for entry in one.logprobs or []] == ["b1", "b2"]
    assert result.text == result.fields["text"] == "aA"
    assert result.finish_reason is FinishReason.LENGTH
    assert result.audio is not None
    assert result.audio.tolist() == [0.25, 0.25, 0.5, 0.5]
    assert (result.audio.dtype, result.sample_rate) == (np.float32, 24_000)
    assert result.multimodal_output["sr"] == 24_000
    assert one.multimodal_output == {}
