"""What a checkpoint's chat template says of the texts that its model writes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnistage.api.parser_names import ReasoningParser, ToolParserName
from omnistage.api.reasoning import CLOSE, OPEN
from omnistage.api.workers import MediaWorkers

_CLOSED_THOUGHT = re.compile(re.escape(OPEN) + r".*?" + re.escape(CLOSE), re.DOTALL)
_MAX_TEMPLATE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """`text` is the template, None where there is none."""

    text: str | None = None

    @property
    def takes_tools(self) -> bool | None:
        """None: not known."""
        return None if self.text is None else "tools" in self.text

    def mentions(self, name: str) -> bool:
        return self.text is not None and name in self.text

    def tool_parser(self, wanted: ToolParserName) -> ToolParserName:
        if wanted != "auto":
            return wanted
        if self.mentions("<function="):
            return "qwen3_coder"
        return "hermes" if self.mentions("<tool_call>") else "none"

    def splits_reasoning(self, wanted: ReasoningParser) -> bool:
        return wanted not in ("none", "auto") or (wanted == "auto" and self.mentions(CLOSE))

    def begins_inside(self, wanted: ReasoningParser, arguments: Mapping[str, Any]) -> bool:
        """Whether the prompt ends inside of a thought, with these arguments of the template."""
        if wanted == "deepseek_r1":
            return True
        if self.text is None or arguments.get("enable_thinking") is False:
            return False
        _, found, tail = self.text.rpartition("add_generation_prompt")
        return bool(found) and OPEN in _CLOSED_THOUGHT.sub("", tail)


class TemplateSource:
    """Reads the template once, off the event loop."""

    def __init__(self, model_path: Path, workers: MediaWorkers) -> None:
        self._model_path = model_path
        self._workers = workers
        self._profile: TemplateProfile | None = None
        self._lock = asyncio.Lock()

    async def profile(self) -> TemplateProfile:
        async with self._lock:
            if self._profile is None:
                text = await self._workers.run(read_template, self._model_path)
                self._profile = TemplateProfile(text)
            return self._profile


def read_template(model_path: Path) -> str | None:
    """The template of a checkpoint directory or a GGUF file, None where it has none."""
    if model_path.suffix == ".gguf" or any(model_path.glob("*.gguf")):
        return _from_gguf(model_path)
    plain = model_path / "chat_template.jinja"
    if plain.is_file():
        return plain.read_text("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        text = _from_json(model_path / name)
        if text is not None:
            return text
    return None


def _from_json(path: Path) -> str | None:
    """`chat_template` is one template or a list of named ones."""
    if not path.is_file() or path.stat().st_size > _MAX_TEMPLATE_BYTES:
        return None
    value = json.loads(path.read_text("utf-8")).get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("tool_use") or named.get("default")
    return value if isinstance(value, str) else None


def _from_gguf(model_path: Path) -> str | None:
    from gguf import GGUFReader

    path = model_path if model_path.is_file() else sorted(model_path.glob("*.gguf"))[0]
    field = GGUFReader(path).get_field("tokenizer.chat_template")
    return None if field is None else str(field.contents())
