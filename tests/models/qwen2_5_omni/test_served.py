"""A tiny Qwen2.5-Omni over HTTP: speech in one file is one pass, in pieces it is close to that."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from omnistage.api.settings import ApiSettings
from omnistage.engine.async_omni import AsyncOmni
from tests.api.live_server import live_server
from tests.api.sounds import decoded
from tests.checkpoints import checkpoint
from tests.models.qwen2_5_omni import reference

GUARD_S = 120.0
SAY: dict[str, Any] = {
    "input": "describe the cat",
    "response_format": "pcm",
    "seed": 3,
    "max_new_tokens": 60,
}
CLOSE = 0.02
"""Of the peak."""
STEP = 2 / 32_767
"""Sounds leave in 16 bits."""


@pytest.mark.invariant("QWEN-OMNI-TWO-INV-005")
async def test_it_speaks_in_pieces_and_in_one_file() -> None:
    model = str(checkpoint(reference.CHECKPOINT))
    async with (
        AsyncOmni(model, served_model_name="omni", process="inline", kv_cache_gib=0.05) as engine,
        live_server(engine, ApiSettings()) as url,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=url, timeout=GUARD_S) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=GUARD_S) as client,
    ):
        voices = (await http.get("/v1/audio/voices")).json()
        assert voices["voices"] == ["Chelsie", "Ethan"]
        assert voices["default"] == "Chelsie"

        streamed, whole, again, other = [
            decoded((await http.post("/v1/audio/speech", json=body)).content, "pcm")
            for body in (
                SAY,
                {**SAY, "stream": False},
                {**SAY, "stream": False, "voice": "Chelsie"},
                {**SAY, "stream": False, "voice": "ethan"},
            )
        ]
        assert np.sqrt(np.mean(whole**2)) > 0.05
        assert streamed.shape == whole.shape
        np.testing.assert_allclose(whole, again, atol=STEP)
        np.testing.assert_allclose(streamed, whole, atol=CLOSE * np.abs(whole).max())
        assert other.shape != whole.shape or np.abs(other - whole).max() > CLOSE

        with pytest.raises(openai.BadRequestError, match="Chelsie, Ethan"):
            await client.audio.speech.create(model="omni", voice="nobody", input="Hi.")
        answer = await client.chat.completions.create(
            model="omni",
            messages=[{"role": "user", "content": "describe the cat"}],
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "wav"},
            max_tokens=6,
            seed=3,
        )
        spoken = answer.choices[0].message.audio
        assert spoken is not None
        assert len(decoded(base64.b64decode(spoken.data), "wav"))
