"""The Qwen2 byte-level BPE tokenizer, trained on the prompt grammar and the pipeline's template.

`QwenImagePipeline` wraps a prompt in a chat template and drops the first 34 tokens of the result.
A tokenizer that knows every word of the template whole makes those 34 tokens exactly the prefix.
"""

import json
from collections.abc import Sequence

import numpy as np
from diffusers import QwenImagePipeline
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from training.tiny_image.prompts import grammar_words
from training.tiny_image.scenes import COLOURS, SHAPES, SIZES
from transformers import AddedToken, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PREFIX_LENGTH = 34  # tokens: QwenImagePipeline.prompt_template_encode_start_idx
MAX_SUFFIX_LENGTH = 40  # tokens: the prompt and the template's end; longer ones are not trained on
VOCABULARY_LIMIT = 1250  # bytes and merges; the special tokens come on top


def prompt_template() -> str:
    """The chat template of the installed pipeline, with one `{}` for the prompt."""
    return QwenImagePipeline(None, None, None, None, None).prompt_template_encode


def _corpus() -> list[str]:
    """Every word in every case, with and without a space before it; often, so that BPE keeps it."""
    words = sorted({*grammar_words(), *COLOURS, *SHAPES, *SIZES})
    words += [f"{shape}es" if shape.endswith("s") else f"{shape}s" for shape in SHAPES]
    lines = [prompt_template()] * 400
    for word in words:
        lines += [word, f" {word}"] * 200
        lines += [word.capitalize(), f" {word.capitalize()}"] * 40
        lines += [word.upper(), f" {word.upper()}"] * 12
    return lines


def train_tokenizer() -> Qwen2Tokenizer:
    """Train the merges and check that the template's prefix is what the pipeline drops."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The template's own special tokens are added below: train on the text between them.
    corpus = [line.replace("<|im_start|>", "\n").replace("<|im_end|>", "\n") for line in _corpus()]
    bpe.train_from_iterator(corpus, trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1058,
        padding_side="right",
    )
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_tokens(specials, special_tokens=True)
    prefix = tokenizer(prompt_template().split("{}")[0]).input_ids
    if len(prefix) != PREFIX_LENGTH:
        raise ValueError(f"the template's prefix is {len(prefix)} tokens, not {PREFIX_LENGTH}")
    return tokenizer


def encode_prompts(tokenizer: Qwen2Tokenizer, prompts: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Tokenize as the pipeline does, into fixed-size rows.

    Returns ids int64 [N, 74] (prefix, prompt, template's end, right padding) and lengths int64 [N]
    without padding; a prompt that is too long is cut, which its length (> 74) shows.
    """
    template = prompt_template()
    rows = tokenizer([template.format(prompt) for prompt in prompts]).input_ids
    width = PREFIX_LENGTH + MAX_SUFFIX_LENGTH
    ids = np.full((len(rows), width), tokenizer.pad_token_id, dtype=np.int64)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row)] = row[:width]
    return ids, np.array([len(row) for row in rows])
