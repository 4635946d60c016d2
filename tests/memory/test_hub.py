"""From names to directories, with a hub that is not there."""

from __future__ import annotations

import json

import httpx
import pytest

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.hub import resolve_model


def test_a_local_directory_is_itself(tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("owner/name") == (tmp_path / "owner" / "name").resolve()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/owner") == (tmp_path / "owner").resolve()


@pytest.mark.parametrize(
    "model", ["/no/such/place", "a b/c", "name", "a/b/c", "", "./missing", "../x"]
)
def test_what_can_be_no_model_is_said_to_be_none(model):
    with pytest.raises(CheckpointError, match="neither an existing directory nor a hub id"):
        resolve_model(model)


def test_offline_without_a_cache_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="hf download nobody/nothing"):
        resolve_model("nobody/nothing")


def response(status):
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RepositoryNotFoundError", "was not found"),
        ("GatedRepoError", "is gated"),
        ("HfHubHTTPError", "cannot be downloaded"),
    ],
)
def test_the_hubs_refusals_are_put_in_words(monkeypatch, name, words):
    from huggingface_hub import errors

    def refuse(*arguments, **options):
        raise getattr(errors, name)("no", response=response(403))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(CheckpointError, match=words):
        resolve_model("owner/name")


def test_of_a_pipeline_only_its_components_are_downloaded(tmp_path, monkeypatch):
    index = {"_class_name": "X", "vae": ["diffusers", "A"], "safety_checker": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    asked = {}

    def snapshot(repo_id, **options):
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: tmp_path / "model_index.json")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_model("owner/name") == tmp_path
    assert wanted(asked, "model_index.json", "vae/config.json", "vae/x-00001-of-2.safetensors")
    for other in ("whole.safetensors", "vae/x.bin", "vae/x.fp16.safetensors", "unet/x.safetensors"):
        assert not wanted(asked, other)


def test_a_single_model_is_downloaded_without_pickles(tmp_path, monkeypatch):
    from huggingface_hub import errors

    asked = {}

    def no_index(*arguments):
        raise errors.EntryNotFoundError("no")

    def snapshot(repo_id, **options):
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", no_index)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    resolve_model("owner/name")
    assert wanted(asked, "model.safetensors", "config.json", "tokenizer.model")
    assert not wanted(asked, "pytorch_model.bin")


def wanted(asked, *names):
    from huggingface_hub.utils import filter_repo_objects

    kept = filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    return list(kept) == list(names)
