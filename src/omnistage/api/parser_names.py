"""Which parsers of answers there are. Imports nothing: the command line asks too."""

from __future__ import annotations

from typing import Literal, get_args

ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1"]
"""Names as vLLM's `--reasoning-parser`. "deepseek_r1": a text begins as a thought, whether it says
so or not; "qwen3": it does after `<think>`, or where the prompt ended with one; "auto": as the
chat template says; "none": nothing is split."""

ToolParserName = Literal["auto", "none", "hermes", "qwen3_coder", "qwen3_xml"]
"""Names as vLLM's `--tool-call-parser`; "auto": as the chat template says."""

REASONING_PARSERS: tuple[str, ...] = get_args(ReasoningParser)
TOOL_PARSERS: tuple[str, ...] = get_args(ToolParserName)
