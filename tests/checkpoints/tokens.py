"""Tokenizers with hand-made vocabularies: no training, so the same ids on every machine.

Each knows a few dozen words whole and spells everything else by bytes or characters.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import transformers

WORDS = (
    "a an and at bad blue blurry by cat dog flower for house image in is low of on over quality "
    "red robot the tree under user with assistant system describe"
)

# Qwen-Image cuts its instruction off the encoded prompt by a fixed count of tokens, which is right
# only where every word of it is one token, as in the real vocabulary.
QWEN_IMAGE_INSTRUCTION_WORDS = (
    "Describe the image by detailing color shape size texture quantity text spatial relationships "
    "of objects and background key features input then explain how user instruction should alter "
    "or modify Generate a new that meets requirements while maintaining consistency with original "
    "where appropriate"
)

QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part.get('text', '') }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]


def clip_tokenizer(max_length: int = 77) -> transformers.CLIPTokenizer:
    from transformers import CLIPTokenizer

    end = "</w>"
    alphabet = _byte_alphabet()
    spellings = [[*word[:-1], word[-1] + end] for word in WORDS.split()]
    vocabulary, merges = _bpe([*alphabet, *(symbol + end for symbol in alphabet)], spellings)
    for token in "<|startoftext|>", "<|endoftext|>":
        vocabulary[token] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=max_length)


def qwen2_tokenizer(max_length: int = 1024) -> transformers.Qwen2Tokenizer:
    """Qwen 2, 2.5-VL and 3: byte-level, ChatML template, padded with `<|endoftext|>`."""
    from transformers import AddedToken, Qwen2Tokenizer

    vocabulary, merges = _byte_level_bpe()
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=max_length,
    )
    specials = [AddedToken(text, special=True, normalized=False) for text in QWEN_SPECIAL_TOKENS]
    tokenizer.add_tokens(specials, special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def t5_tokenizer(max_length: int = 512, sentinels: int = 10) -> transformers.T5Tokenizer:
    """Unigram pieces `▁word` before single characters, then the sentinels `<extra_id_N>`."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"▁{word}", -4.0) for word in WORDS.split()]
    pieces += [(symbol, -12.0) for symbol in ["▁", *string.printable.strip()]]
    pieces += [(f"<extra_id_{index}>", 0.0) for index in reversed(range(sentinels))]
    return T5Tokenizer(vocab=pieces, extra_ids=sentinels, model_max_length=max_length)


def gemma_tokenizer(max_length: int = 1024) -> transformers.GemmaTokenizer:
    from transformers import GemmaTokenizer

    vocabulary, merges = _sentencepiece_bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    return GemmaTokenizer(
        vocab=vocabulary,
        merges=merges,
        add_bos_token=True,
        padding_side="right",
        model_max_length=max_length,
    )


def llama_tokenizer(max_length: int = 1024) -> transformers.LlamaTokenizer:
    from transformers import LlamaTokenizer

    vocabulary, merges = _sentencepiece_bpe(["<unk>", "<s>", "</s>"])
    return LlamaTokenizer(
        vocab=vocabulary, merges=merges, pad_token="</s>", model_max_length=max_length
    )


def glm_tokenizer(max_length: int = 1024) -> transformers.PreTrainedTokenizerFast:
    """Known by no class of its own: all it is stands in `tokenizer.json`. Padded on the left."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(*_byte_level_bpe()))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=max_length,
    )


def bert_tokenizer(max_length: int = 77) -> transformers.BertTokenizer:
    from transformers import BertTokenizer

    symbols = string.ascii_lowercase + string.digits + string.punctuation
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *symbols]
    pieces += [f"##{symbol}" for symbol in symbols] + [
        word for word in WORDS.split() if word != "a"
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return BertTokenizer(vocab=vocabulary, model_max_length=max_length)


def _byte_level_bpe() -> tuple[Vocabulary, Merges]:
    at_line_start = [*WORDS.split(), "Describe"]
    after_space = [f"Ġ{word}" for word in f"{WORDS} {QWEN_IMAGE_INSTRUCTION_WORDS}".split()]
    return _bpe(_byte_alphabet(), [list(word) for word in at_line_start + after_space])


def _byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _sentencepiece_bpe(specials: list[str]) -> tuple[Vocabulary, Merges]:
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *string.printable.strip()]
    return _bpe([*specials, *alphabet], [list(f"▁{word}") for word in WORDS.split()])


def _bpe(symbols: Iterable[str], spellings: Iterable[list[str]]) -> tuple[Vocabulary, Merges]:
    """A vocabulary in which each spelling is one token.

    Merges apply in their order, so an earlier word's may break up a later one ("at" takes the
    end of "cat" before "ca" can form). Hence each spelling is first merged by what is there, and
    what is left of it is joined by new merges, which, coming last, disturb no earlier word.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    merges: Merges = []
    for spelling in spellings:
        joined, *rest = _merged(spelling, merges)
        for part in rest:
            merges.append((joined, part))
            joined += part
            vocabulary.setdefault(joined, len(vocabulary))
    return vocabulary, merges


def _merged(parts: list[str], merges: Merges) -> list[str]:
    for left, right in merges:
        index = 0
        while index < len(parts) - 1:
            if (parts[index], parts[index + 1]) == (left, right):
                parts = [*parts[:index], left + right, *parts[index + 2 :]]
            index += 1
    return parts
