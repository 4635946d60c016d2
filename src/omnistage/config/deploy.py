"""The deploy file: where the stages of a pipeline run and how large. Strict YAML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from omnistage.config.checks import require_mapping, suggestion
from omnistage.config.layers import Layer, split_layer
from omnistage.contracts.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class DeployConfig(Layer):
    """A checked deploy file. Sparse: what it leaves out keeps its default."""


def load_deploy(path_or_name: str | Path) -> DeployConfig:
    """Read a deploy file by path, or a bundled one by its name (`bundled_deploys()`).

    Raises `ConfigurationError` for a missing file, malformed YAML, duplicate or unknown keys and
    wrong types; the message names the file, the key's path and the nearest valid key.
    """
    origin, text = _read(path_or_name)
    try:
        return parse_deploy(text, origin=origin)
    except ConfigurationError as error:
        raise ConfigurationError(f"deploy file {origin}: {error.message}") from error.__cause__


def parse_deploy(text: str, *, origin: str = "<string>") -> DeployConfig:
    """Check the text of a deploy file."""
    try:
        document = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"not valid YAML: {_one_line(error)}") from error
    settings = require_mapping({} if document is None else document, "the file")
    stages = settings.pop("stages", [])
    return DeployConfig(**split_layer(settings, _numbered(stages), origin=origin))


def bundled_deploys() -> tuple[str, ...]:
    """Names of the deploy files that come with the package."""
    folder = files("omnistage") / "deploys"
    names = (Path(entry.name) for entry in folder.iterdir())
    return tuple(sorted(name.stem for name in names if name.suffix == ".yaml"))


def _read(path_or_name: str | Path) -> tuple[str, str]:
    path = Path(path_or_name).expanduser()
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        try:
            return str(path), path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigurationError(f"cannot read deploy file {path}: {reason}") from error
    name = str(path_or_name)
    if name not in bundled_deploys():
        raise ConfigurationError(
            f"no deploy file {name!r}: neither a file nor the name of a bundled one; "
            f"{suggestion(name, bundled_deploys())}"
        )
    text = (files("omnistage") / "deploys" / f"{name}.yaml").read_text(encoding="utf-8")
    return f"{name}.yaml (bundled)", text


def _numbered(stages: Any) -> Iterator[tuple[int, Any, str]]:
    if not isinstance(stages, list):
        raise ConfigurationError(f"stages must be a list of stages, got {stages!r}")
    for index, entry in enumerate(stages):
        where = f"stages[{index}]"
        values = require_mapping(entry, where)
        stage_id = values.pop("stage_id", None)
        if isinstance(stage_id, bool) or not isinstance(stage_id, int) or stage_id < 0:
            raise ConfigurationError(
                f"{where}.stage_id is {stage_id!r}; every stage needs its number, 0 or more"
            )
        yield stage_id, values, where


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, refusing duplicate keys instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain value", key_node.start_mark
                )
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _one_line(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    mark = getattr(error, "problem_mark", None)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else str(problem)
