"""From prompts, chats and token ids to ids, within limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from omnistage.ar.tokenizer import encode, load_tokenizer, prepare_text
from omnistage.contracts.errors import CheckpointError, InvalidRequestError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from tests.checkpoints import checkpoint
from tests.checkpoints.gguf_files import write_gguf

CHAT = [
    {"role": "user", "content": "describe the red cat"},
    {"role": "assistant", "content": "it is on the tree"},
    {"role": "user", "content": "and the dog"},
]


@cache
def tokenizer(family="qwen3"):
    return load_tokenizer(checkpoint(family))


def prepared(family="qwen3", max_model_len=2048, tensors=None, **fields):
    data = StageData(modality=Modality.TEXT, fields=fields, tensors=tensors or {})
    words = tokenizer(family)
    return prepare_text(data, words, max_model_len=max_model_len, vocab_size=len(words))


def refused(**fields):
    with pytest.raises(InvalidRequestError) as caught:
        prepared(**fields)
    return caught.value.param, str(caught.value)


@pytest.mark.invariant("AR-INV-220")
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "phi", "gpt-oss"])
def test_prompts_and_chats_are_tokenized_as_the_library_does(family):
    words = tokenizer(family)
    prompt = "the blue house"
    assert prepared(family, prompt=prompt) == words(prompt).input_ids
    assert prepared(family, messages=CHAT) == words.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.invariant("AR-INV-220")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_text_begins_once(family):
    begin = tokenizer(family).bos_token_id
    for fields in ({"prompt": "a cat"}, {"messages": CHAT}):
        ids = prepared(family, **fields)
        assert ids[0] == begin
        assert begin not in ids[1:]
    assert begin not in prepared(family, prompt="a cat", add_special_tokens=False)


def test_the_last_message_can_be_continued():
    continued = prepared(messages=CHAT[:2], continue_final_message=True)
    assert tokenizer().decode(continued).endswith("it is on the tree")
    assert prepared(messages=CHAT, add_generation_prompt=False) == prepared(messages=CHAT)[:-3]


def test_token_ids_are_taken_as_they_are():
    assert prepared(prompt_token_ids=[5, 6, 7]) == [5, 6, 7]


@pytest.mark.invariant("AR-INV-221")
@pytest.mark.parametrize("ids", [[5, 552], [-1], [True], [1.0], ["5"], "55", 5])
def test_ids_outside_the_vocabulary_are_refused(ids):
    param, message = refused(prompt_token_ids=ids)
    assert param == "prompt_token_ids"
    assert "551" in message or "list of integers" in message


@pytest.mark.invariant("AR-INV-221")
def test_a_prompt_must_leave_room_for_one_token():
    ids = list(range(10))
    assert prepared(prompt_token_ids=ids, max_model_len=11) == ids
    param, message = refused(prompt_token_ids=ids, max_model_len=10)
    assert param == "prompt_token_ids"
    assert "10 tokens" in message
    assert "max_model_len is 10" in message


@pytest.mark.invariant("AR-INV-221")
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "empty"),
        ({"messages": []}, "messages", "at least one"),
        ({}, "prompt", "exactly one of"),
        ({"prompt": "a", "messages": CHAT}, "messages", "exactly one of"),
        ({"prompt": 5}, "prompt", "must be a string"),
        ({"prompt": "\ud800"}, "prompt", "no valid Unicode"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "prompt", "no valid Unicode"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "index": 0}]}]},
            "messages",
            "text only, no image",
        ),
        ({"prompt": "a", "tensors": {"audio_0": None}}, "prompt", "text only, no audio_0"),
    ],
)
def test_what_cannot_be_a_prompt_names_its_field(fields, param, words):
    found, message = refused(**fields)
    assert found == param
    assert words in message


class Reader:
    """A tokenizer that counts the characters it is given."""

    def __init__(self):
        self.most = 0

    def __call__(self, text, **options):
        self.most = max(self.most, len(text))
        return tokenizer()(text, **options)


@pytest.mark.invariant("AR-INV-222")
def test_of_a_text_far_beyond_the_limit_only_the_beginning_is_read():
    reader = Reader()
    with pytest.raises(InvalidRequestError, match=r"400000 characters.*max_model_len is 10:"):
        encode(reader, "cat " * 100_000, False, 10)
    assert 0 < reader.most <= 1000


def test_a_long_text_of_few_tokens_is_read_whole():
    """`<|endoftext|>` is one token of 13 characters: its beginning shows no excess."""
    assert len(encode(tokenizer(), "<|endoftext|>" * 25, False, 10)) == 25


def test_several_threads_may_use_one_tokenizer():
    texts = [f"the {'red ' * (i % 7)}cat {i}" for i in range(200)]
    expected = [prepared(prompt=text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: prepared(prompt=text), texts)) == expected


def test_a_gguf_file_brings_tokenizer_and_template(tmp_path):
    words = load_tokenizer(write_gguf(tmp_path / "tiny.gguf"))
    reference = tokenizer("smollm2")
    text = reference.apply_chat_template(CHAT, tokenize=False)
    assert words.apply_chat_template(CHAT, tokenize=False) == text
    assert words(text).input_ids == reference(text).input_ids
    assert words.eos_token_id == reference.eos_token_id


def test_a_folder_without_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot load the tokenizer of"):
        load_tokenizer(tmp_path)
