"""Every tiny token model loads with plain transformers and says what can expose errors."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from tests.checkpoints import TOKEN_FAMILIES, checkpoint

SIZE_LIMIT_BYTES = 3_000_000
PROMPT = "describe the blue dog under a tree"
NEW_TOKENS = 24
OMNI = ("qwen3-omni", "qwen2.5-omni")
DECODERS = [name for name in TOKEN_FAMILIES if name not in OMNI]
SERVED = [name for name in DECODERS if not TOKEN_FAMILIES[name].gate]


@cache
def load(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def say(name, prompt):
    """The greedy continuation, its length fixed, and the logits of each step."""
    model, tokenizer = load(name)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    result = model.generate(
        ids,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences[0, ids.shape[1] :].tolist(), torch.cat(result.logits)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_many_and_no_near_ties(name):
    ids, logits = say(name, PROMPT)
    assert len(set(ids)) > 5, "it repeats itself"
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-3
    assert 2 < logits.std() < 6


@pytest.mark.parametrize("name", DECODERS)
def test_the_first_words_matter(name):
    said, logits = say(name, PROMPT)
    other_said, other = say(name, PROMPT.replace("describe", "house"))
    assert said != other_said or TOKEN_FAMILIES[name].gate
    assert (logits[0] - other[0]).abs().max() > 0.1


@pytest.mark.parametrize("name", TOKEN_FAMILIES)
def test_checkpoint_is_small_and_names_its_class(name):
    from transformers import AutoConfig

    folder = checkpoint(name)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= SIZE_LIMIT_BYTES
    assert AutoConfig.from_pretrained(folder).architectures == [TOKEN_FAMILIES[name].architecture]


@cache
def load_omni(name):
    import transformers

    folder = checkpoint(name)
    cls = getattr(transformers, TOKEN_FAMILIES[name].architecture)
    model = cls.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoProcessor.from_pretrained(folder)


def omni_inputs(processor, kinds, **changes):
    rng = np.random.default_rng(0)
    media = {
        "images": rng.integers(0, 256, (64, 96, 3), dtype=np.uint8),
        "audio": np.sin(np.arange(16_000, dtype=np.float32) / 6),
        "videos": rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8),
    } | changes
    parts = [{"type": kind.rstrip("s")} for kind in kinds] + [{"type": "text", "text": PROMPT}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    given = {kind: [media[kind]] for kind in kinds}
    return processor(text=text, **given, return_tensors="pt", padding=True)


@pytest.mark.parametrize("kind", ["images", "audio", "videos"])
@pytest.mark.parametrize("name", OMNI)
def test_the_thinker_hears_and_sees(name, kind):
    model, processor = load_omni(name)
    noise = {
        "images": np.zeros((64, 96, 3), np.uint8),
        "audio": np.random.default_rng(1).normal(size=16_000).astype(np.float32),
        "videos": np.zeros((4, 64, 64, 3), np.uint8),
    }
    logits = []
    for changes in ({}, {kind: noise[kind]}):
        inputs = omni_inputs(processor, (kind,), **changes)
        with torch.no_grad():
            logits.append(model.thinker(**inputs).logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 0.1


@pytest.mark.parametrize("name", OMNI)
def test_speech_is_loud_and_not_clipped(name):
    model, processor = load_omni(name)
    torch.manual_seed(0)
    _, waveform = model.generate(
        **omni_inputs(processor, ()),
        thinker_max_new_tokens=12,
        talker_max_new_tokens=24,
        talker_do_sample=False,
        **({"talker_eos_token_id": [130]} if name == "qwen2.5-omni" else {}),
    )
    assert waveform.numel() > 5_000
    assert waveform.square().mean().sqrt() >= 0.05
    assert (waveform.abs() >= 1).float().mean() < 0.01
