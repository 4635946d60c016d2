"""Token models with random weights, made on the device, as factories of a token stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}

_built: dict[tuple[str, str], Any] = {}


def qwen3(shape: str, device: str, attention: str = "sdpa") -> Any:
    """A `Qwen3ForCausalLM`, one a shape and device: whoever asks again gets the same module."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

    key = (shape, device)
    if key not in _built:
        config = Qwen3Config(**SHAPES[shape])
        config._attn_implementation = attention
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
        try:
            with torch.device(device):
                module = AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.02)
        module.generation_config = GenerationConfig(eos_token_id=0)
        _built[key] = module.eval()
    return _built[key]


def build_qwen3_8b(stage: Any, device: str, report: Any) -> Any:
    return _causal_lm("qwen3-8b", device)


def build_tiny(stage: Any, device: str, report: Any) -> Any:
    return _causal_lm("tiny", device)


def _causal_lm(shape: str, device: str) -> Any:
    from omnistage.ar.causal_lm import CausalLM
    from omnistage.attention.paged import register

    module = qwen3(shape, device)
    module.set_attn_implementation(register())
    return CausalLM(module, tokenizer=None)


def token_stage(model: str, device: str, **settings: Any) -> Any:
    """A `ResolvedStage` whose model is the factory `_ar_models:<model>`."""
    return _stage(f"_ar_models:{model}", "random weights", device, **settings)


def loaded_stage(model_path: str, dtype: str, **settings: Any) -> Any:
    """A `ResolvedStage` on the CPU that loads a checkpoint as the engine's own does."""
    factory = "omnistage.models.causal_lm.model:build"
    return _stage(factory, model_path, "cpu", dtype=dtype, **settings)


def _stage(factory: str, model_path: str, device: str, **settings: Any) -> Any:
    from omnistage.config.pipeline import ExecutionType, StageConfig
    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.modalities import Modality

    return ResolvedStage(
        stage=StageConfig(
            stage_id=0,
            name="language_model",
            execution_type=ExecutionType.LLM_AR,
            runtime="omnistage.ar.runtime:TokenRuntime",
            final_output=True,
            output_modality=Modality.TOKENS,
        ),
        model_path=model_path,
        process="inline",
        devices=(device,),
        options={"token_model": factory},
        **settings,
    )


LLAMA_135M: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""SmolLM2-135M."""
QWEN3_58M: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 65536,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""58 million weights, of which the embeddings, which are the head too, are 34 million."""


def save_checkpoint(shape: str, folder: Path) -> None:
    """Random float32 weights of a shape with a tokenizer of one word a token, as `save_pretrained`
    writes them: what any server loads."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    made = {
        "llama-135m": (LlamaForCausalLM, LlamaConfig, LLAMA_135M),
        "qwen3-58m": (Qwen3ForCausalLM, Qwen3Config, QWEN3_58M),
    }
    module_class, config_class, values = made[shape]
    torch.manual_seed(0)
    module_class(config_class(**values)).save_pretrained(folder)
    words = {f"word{index}": index for index in range(values["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word2").save_pretrained(folder)
