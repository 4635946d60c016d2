"""What a checkpoint of `transformers` says about itself, read without torch or transformers."""

from __future__ import annotations

import ast
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.names import and_more

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
GENERATION_CONFIG = "generation_config"
"""The key under which a family finds the content of `generation_config.json`, if there is one."""

_GGUF_MAGIC = b"GGUF"
_MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")


def token_index(folder: Path) -> dict[str, Any]:
    """The content of `config.json`, and of `generation_config.json` under `GENERATION_CONFIG`.

    Raises `CheckpointError` naming the file.
    """
    index = _json_object(folder / CONFIG_NAME)
    generation = folder / GENERATION_CONFIG_NAME
    if generation.is_file():
        index[GENERATION_CONFIG] = _json_object(generation)
    return index


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or, of a folder without `config.json`, the only one in it.

    Raises `CheckpointError` when there are several, or when it is none.
    """
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or (path / CONFIG_NAME).is_file():
            return None
        if len(files) > 1:
            raise CheckpointError(
                f"{path} holds several GGUF files ({and_more(file.name for file in files)}); give "
                "the path of one"
            )
        path = files[0]
    elif path.suffix != ".gguf":
        return None
    with path.open("rb") as stream:
        if stream.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise CheckpointError(f"{path} is no GGUF file, or a damaged one; download it again")
    return path


@cache
def causal_lm_architectures() -> frozenset[str]:
    """The class names that `AutoModelForCausalLM` builds of decoders for text, from the source of
    the installed transformers."""
    spec = find_spec("transformers")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise CheckpointError("transformers is not installed; install with: pip install omnistage")
    source = Path(places[0], "models", "auto", "modeling_auto.py").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == _MAPPING:
            words = [node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)]
            return frozenset(
                word for word in words if isinstance(word, str) and word.endswith(_CAUSAL_ENDINGS)
            )
    raise CheckpointError(
        f"the installed transformers has no {_MAPPING}; use version 5.17 or newer"
    )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content
