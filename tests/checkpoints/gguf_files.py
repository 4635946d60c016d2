"""A tiny SmolLM2 as a GGUF file, made with the `gguf` package as llama.cpp's converter makes it."""

from __future__ import annotations

import json
from pathlib import Path

from .store import checkpoint

NORMAL, CONTROL = 1, 3
"""Token types of llama.cpp."""


def write_gguf(target: Path, *, quantized: bool = False) -> Path:
    """Writes the checkpoint "smollm2" to `target`, float32, or with matrices of 8 bits."""
    import gguf

    folder = checkpoint("smollm2")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, folder)
    _add_tensors(writer, folder, config, quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_tokenizer(writer, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    ids = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words = sorted((ids | special).items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([CONTROL if word in special else NORMAL for word, _ in words])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_pad_token_id(special["<|endoftext|>"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text("utf-8"))


def _add_tensors(writer, folder: Path, config: dict, quantized: bool) -> None:
    import gguf
    from safetensors.numpy import load_file

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for key, tensor in load_file(folder / "model.safetensors").items():
        name = names.get_name(key, try_suffixes=(".weight",))
        projection = key.split(".")[-2]
        if projection in heads:
            tensor = _permuted(tensor, heads[projection])
        if quantized and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)


def _permuted(weight, heads: int):
    """llama.cpp rotates neighbours, transformers halves of a head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)
