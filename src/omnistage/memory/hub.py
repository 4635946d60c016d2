"""From what a user names as a model to a local directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

from omnistage.contracts.errors import CheckpointError

WANTED = ("safetensors", "json", "txt", "model", "jinja", "tiktoken", "spm")
"""Endings of what is downloaded: weights as safetensors only, and what configurations, tokenizers
and processors consist of."""

VARIANTS = ("*.fp16.*", "*.fp16-*", "*.bf16.*", "*.bf16-*", "*.non_ema.*", "*.ema.*")
"""The same weights again, which `diffusers` takes only when asked for."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def resolve_model(model: str) -> Path:
    """The directory of `model`: a local path, or a Hugging Face hub id (`owner/name`), downloaded
    if it is not in the cache. `HF_HUB_OFFLINE` and `HF_HOME` are respected.

    Raises `CheckpointError` that says what to do.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return path.resolve()
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"model {model!r} is neither an existing directory nor a hub id of the form owner/name"
        )
    return _download(model)


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                repo_id, allow_patterns=_patterns(repo_id), ignore_patterns=list(VARIANTS)
            )
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"model {repo_id!r} is gated: accept its terms on its hub page, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {repo_id!r} was not found: there is no such local directory, and no such "
            "model on the hub (a private one needs `hf auth login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"model {repo_id!r} is no local directory, is not in the cache, and the hub cannot be "
            "reached (HF_HUB_OFFLINE is set, or there is no connection): give the path of a local "
            f"directory, or run `hf download {repo_id}` while online"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"model {repo_id!r} cannot be downloaded: {error}") from error


def _patterns(repo_id: str) -> list[str]:
    """Of a pipeline only the folders of its components: many repositories hold the same weights
    once more, in a single file beside them."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        index = json.loads(Path(hf_hub_download(repo_id, "model_index.json")).read_text("utf-8"))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return [f"*.{ending}" for ending in WANTED]
    folders = [name for name, entry in index.items() if isinstance(entry, list) and entry[0]]
    return ["model_index.json", *(f"{name}/*.{ending}" for name in folders for ending in WANTED)]
