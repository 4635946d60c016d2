"""Headers and layouts of checkpoint folders, whole and damaged."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.checkpoint import read_checkpoint, read_header

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.int64),
    "empty": np.zeros((0, 3), dtype=np.float16),
}


def write(path, tensors=TENSORS):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.invariant("LOAD-INV-001")
def test_a_header_says_where_the_bytes_of_a_tensor_lie(tmp_path):
    file = write(tmp_path / "model.safetensors")
    header = read_header(file)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in header.items()} == {
        "a.weight": ("float32", (2, 3)),
        "b": ("int64", (4,)),
        "empty": ("float16", (0, 3)),
    }
    stored = header["a.weight"]
    content = file.read_bytes()[stored.offset_bytes : stored.offset_bytes + stored.nbytes]
    assert np.array_equal(np.frombuffer(content, np.float32).reshape(2, 3), TENSORS["a.weight"])


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "nothing": (b"", "truncated"),
    "few bytes": (b"\x10\x00", "truncated"),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "a huge header": (b"\xff" * 8 + b"{}", "no safetensors file"),
    "no JSON": (struct.pack("<Q", 2) + b"{]", "no valid JSON"),
    "no text": (struct.pack("<Q", 2) + b"\xff\xfe", "no valid JSON"),
    "a JSON list": (struct.pack("<Q", 2) + b"[]", "JSON object"),
}


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_no_safetensors_file_is_named(tmp_path, case):
    content, words = DAMAGED[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"x": ENTRY}, b"1234567", "truncated"),
        ({"x": ENTRY}, b"123456789", "corrupt"),
        ({"x": ENTRY | {"dtype": "F7"}}, b"12345678", "'x'"),
        ({"x": ENTRY | {"shape": [3]}}, b"12345678", "'x'"),
        ({"x": ENTRY | {"shape": [-2], "data_offsets": [8, 0]}}, b"12345678", "'x'"),
        ({"x": {"dtype": "F32"}}, b"", "'x'"),
        ({"x": 7}, b"", "'x'"),
        ({"x": ENTRY, "y": ENTRY}, b"12345678", "'y'"),
        ({"x": ENTRY | {"data_offsets": [4, 12]}}, b"123456789012", "'x'"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(tmp_path, header, data, words):
    file = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def write_shards(folder, variant=""):
    parts = {"model-00001-of-00002": ["a.weight"], "model-00002-of-00002": ["b", "empty"]}
    weight_map = {}
    for stem, keys in parts.items():
        name = f"{stem}.safetensors" if not variant else f"model.{variant}-{stem[6:]}.safetensors"
        write(folder / name, {key: TENSORS[key] for key in keys})
        weight_map |= dict.fromkeys(keys, name)
    dotted = f".{variant}" if variant else ""
    index = folder / f"model.safetensors.index{dotted}.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


@pytest.mark.invariant("LOAD-INV-001")
@pytest.mark.parametrize("variant", ["", "fp16"])
def test_shards_are_one_checkpoint(tmp_path, variant):
    write_shards(tmp_path, variant)
    found = read_checkpoint(tmp_path, stem="model", variant=variant or None)
    assert set(found.tensors) == set(TENSORS)
    assert len(found.files) == 2
    assert {key: tensor.nbytes for key, tensor in found.tensors.items()} == {
        key: array.nbytes for key, array in TENSORS.items()
    }


def test_a_folder_with_one_variant_only_is_read_and_says_so(tmp_path):
    write(tmp_path / "model.fp16.safetensors")
    assert read_checkpoint(tmp_path, stem="model").variant == "fp16"


def test_plain_files_are_taken_where_there_are_variants_too(tmp_path):
    write(tmp_path / "model.safetensors")
    write(tmp_path / "model.fp16.safetensors")
    assert read_checkpoint(tmp_path, stem="model").variant is None
    assert read_checkpoint(tmp_path, stem="model", variant="fp16").variant == "fp16"


def test_between_several_variants_somebody_has_to_choose(tmp_path):
    write(tmp_path / "model.fp16.safetensors")
    write(tmp_path / "model.ema.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.ema\.safetensors, model\.fp16"):
        read_checkpoint(tmp_path, stem="model")


@pytest.mark.parametrize("index_first", [True, False])
def test_which_of_both_layouts_wins_is_the_librarys_choice(tmp_path, index_first):
    write(tmp_path / "model.safetensors")
    write_shards(tmp_path)
    found = read_checkpoint(tmp_path, stem="model", index_first=index_first)
    assert len(found.files) == (2 if index_first else 1)


@pytest.mark.invariant("LOAD-INV-004")
@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"b": "../model.safetensors"}, "plain file name"),
        ({"b": "/etc/passwd"}, "plain file name"),
        ({"b": "model-00001-of-00001.bin"}, "only safetensors"),
        ({"b": "model-00009-of-00009.safetensors"}, "model-00009-of-00009.safetensors is missing"),
        ({"c": "model-00001-of-00002.safetensors"}, "lacks c"),
        ({"b": 3}, "plain file name"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_a_wrong_index_is_named(tmp_path, weight_map, words):
    index = write_shards(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=words) as caught:
        read_checkpoint(tmp_path, stem="model")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.invariant("LOAD-INV-004")
def test_shards_that_repeat_a_key_are_refused(tmp_path):
    write_shards(tmp_path)
    write(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"both hold 'a\.weight'"):
        read_checkpoint(tmp_path, stem="model")


@pytest.mark.invariant("LOAD-INV-005")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.ckpt", "model.gguf", "tf_model.h5"])
def test_other_formats_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"never opened")
    with pytest.raises(CheckpointError, match="only safetensors") as caught:
        read_checkpoint(tmp_path, stem="model")
    assert name in str(caught.value)


def test_an_empty_and_an_absent_folder_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        read_checkpoint(tmp_path, stem="model")
    with pytest.raises(CheckpointError, match="absent is missing"):
        read_checkpoint(tmp_path / "absent", stem="model")
