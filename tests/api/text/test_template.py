"""What a chat template says of the texts its model writes."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from omnistage.api.settings import ApiSettings
from omnistage.api.text.template import TemplateProfile, read_template
from omnistage.contracts.errors import ConfigurationError
from tests.api.conftest import open_client
from tests.api.fake_text_engine import FakeTextEngine

pytestmark = pytest.mark.invariant("ENTRY-INV-233")

QWEN3 = """{% if tools %}<tool_call>{"name"}</tool_call>{% endif %}
{% if '</think>' in content %}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}
{% endif %}"""
THINKING = """{% if '</think>' in content %}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"""
BOTH = """{% if '</think>' in content %}{% endif %}{% if add_generation_prompt %}assistant
{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"""
CODER = "{% if tools %}<tool_call><function=x><parameter=y></parameter></function>{% endif %}"


@pytest.mark.parametrize(
    ("text", "tools", "splits", "inside", "inside_without_thinking"),
    [
        (QWEN3, "hermes", True, False, False),
        (THINKING, "none", True, True, False),
        (BOTH, "none", True, True, False),
        (CODER, "qwen3_coder", False, False, False),
        ("{{ messages }}", "none", False, False, False),
        (None, "none", False, False, False),
    ],
)
def test_auto_reads_the_template(
    text: str | None, tools: str, splits: bool, inside: bool, inside_without_thinking: bool
) -> None:
    profile = TemplateProfile(text)
    assert profile.tool_parser("auto") == tools
    assert profile.splits_reasoning("auto") == splits
    assert profile.begins_inside("auto", {}) == inside
    off = {"enable_thinking": False}
    assert profile.begins_inside("auto", off) == inside_without_thinking


def test_a_named_parser_wins() -> None:
    profile = TemplateProfile(QWEN3)
    assert profile.tool_parser("qwen3_coder") == "qwen3_coder"
    assert profile.begins_inside("deepseek_r1", {})
    assert not profile.splits_reasoning("none")
    assert TemplateProfile(None).splits_reasoning("qwen3")
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigurationError, match="allowed: auto"):
            ApiSettings(**{name: "unknown"})  # type: ignore[arg-type]


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == "t"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert read_template(tmp_path) == "j"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_template(tmp_path) == "jinja"


async def answer_of(client: httpx.AsyncClient, **more: object) -> dict[str, str]:
    body = {"messages": [{"role": "user", "content": "x"}], **more}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    message: dict[str, str] = response.json()["choices"][0]["message"]
    return message


async def test_requests_choose_what_becomes_of_thoughts(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(THINKING + "enable_thinking")
    engine = FakeTextEngine(
        script=lambda prompt, child: ["hm\n", "</think>\n\n", "yes"], model_path=str(tmp_path)
    )
    async with open_client(engine) as client:
        both = await answer_of(client)
        assert (both["reasoning_content"], both["content"]) == ("hm", "yes")
        hidden = await answer_of(client, include_reasoning=False)
        assert "reasoning_content" not in hidden
        assert hidden["content"] == "yes"
        plain = await answer_of(client, separate_reasoning=False)
        assert plain["content"] == "hm\n</think>\n\nyes"
        off = await answer_of(client, reasoning_effort="none")
        assert off["content"] == "hm\n</think>\n\nyes"
        structured = await answer_of(client, guided_regex="a")
        assert structured["content"] == "hm\n</think>\n\nyes"
    assert engine.text_calls[3].prompt["chat_template_kwargs"] == {"enable_thinking": False}
