"""Small fast tokenizers, trained on the spot: byte-level BPE as Qwen's, byte fallback as Gemma's
and as Llama 2's (which takes a text's leading space off), and one that joins words."""

from __future__ import annotations

from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The capital of France is Paris. The capital of Italy is Rome.",
    "a robot dancing in the rain, 0123456789 def f(x): return x + 1",
    'user assistant {"name": "value", "list": [1, 2, 3], "ok": true, "none": null}',
    "一只猫在草地上跑。你好，世界。",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
END, START, TOOL = "<end>", "<start>", "<tool>"


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    special = [AddedToken(text, special=True, normalized=False) for text in (END, START)]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(TOOL, special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend)


def _byte_fallback(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", *BYTES], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    plain = Tokenizer(
        models.BPE(
            vocab=backend.get_vocab(with_added_tokens=False),
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    plain.normalizer, plain.decoder = backend.normalizer, decoder
    return _wrapped(plain)


@cache
def gemma_like() -> PreTrainedTokenizerFast:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoders.Sequence(steps))


@cache
def llama_like() -> PreTrainedTokenizerFast:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]))


@cache
def metaspace() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend)


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend)
