"""Qwen3-Omni with random weights, made on the device: the library's whole model for a peer, and its
parts as factories of our stages. Encoders are left small: prompts are text."""

from __future__ import annotations

import os
from typing import Any

SHAPE_VARIABLE = "OMNISTAGE_BENCH_SHAPE"
"""Stages are built in processes of their own: the shape's name reaches them by environment."""

_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True, "interleaved": True}
_SMALL_EYES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
_SMALL_EARS: dict[str, Any] = {
    "d_model": 64,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "encoder_layers": 1,
    "num_mel_bins": 128,
    "downsample_hidden_size": 8,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-omni-30b-a3b": {
        "thinker": {
            "vocab_size": 152064,
            "hidden_size": 2048,
            "intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 65536,
            "rope_parameters": _ROPE | {"mrope_section": [24, 20, 20]},
        },
        "talker": {
            "vocab_size": 3072,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "moe_intermediate_size": 384,
            "shared_expert_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "max_position_embeddings": 65536,
            "rope_parameters": _ROPE | {"mrope_section": [24, 20, 20]},
        },
        "predictor": {
            "vocab_size": 2048,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_code_groups": 16,
        },
        "codec": {
            "codebook_size": 2048,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_quantizers": 16,
            "sliding_window": 72,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 1536,
        },
        "codes": 2048,
        "accept_hidden_layer": 24,
    },
    "tiny": {
        "thinker": {
            "vocab_size": 152064,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]},
        },
        "talker": {
            "vocab_size": 1024 + 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]},
        },
        "predictor": {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_code_groups": 4,
        },
        "codec": {
            "codebook_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_quantizers": 4,
            "sliding_window": 72,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 64,
        },
        "codes": 64,
        "accept_hidden_layer": 2,
    },
}


def config_of(shape: str) -> Any:
    """A `Qwen3OmniMoeConfig` with the released checkpoint's special ids of text."""
    from transformers import Qwen3OmniMoeConfig

    parts = SHAPES[shape]
    codes, hidden = parts["codes"], parts["thinker"]["hidden_size"]
    return Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": parts["thinker"],
            "vision_config": _SMALL_EYES | {"out_hidden_size": hidden},
            "audio_config": _SMALL_EARS | {"output_dim": hidden},
            "vision_start_token_id": 151652,
            "vision_end_token_id": 151653,
            "audio_end_token_id": 151648,
        },
        talker_config={
            "text_config": parts["talker"],
            "code_predictor_config": parts["predictor"],
            "num_code_groups": parts["predictor"]["num_code_groups"],
            "thinker_hidden_size": hidden,
            "accept_hidden_layer": parts["accept_hidden_layer"],
            "spatial_merge_size": 2,
            "vision_start_token_id": 151652,
            "codec_eos_token_id": codes + 102,
            "codec_bos_id": codes + 101,
            "codec_pad_id": codes + 100,
            "codec_nothink_id": codes + 107,
            "codec_think_bos_id": codes + 108,
            "codec_think_eos_id": codes + 109,
            "speaker_id": {"chelsie": codes + 253, "ethan": codes + 254},
        },
        code2wav_config=parts["codec"],
        enable_audio_output=True,
    )


def prompt_ids(config: Any, length: int, seed: int) -> list[int]:
    """A user's turn of `length` random ids, and the opening of the assistant's."""
    import random

    draw = random.Random(seed)
    words = [draw.randrange(1000, 100000) for _ in range(length)]
    newline = 198
    start, end = config.im_start_token_id, config.im_end_token_id
    user, assistant = config.user_token_id, config.assistant_token_id
    return [start, user, newline, *words, end, newline, start, assistant, newline]


def make(cls: type, config: Any, device: str) -> Any:
    """An instance with random weights on the device."""
    import torch
    from transformers.initialization import no_init_weights

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), no_init_weights():
            module = cls._from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return module.eval()


class _IdsOnly:
    """`ThinkerInputs` for prompts of ids, without a processor."""

    tokenizer = None

    def __init__(self, config: Any) -> None:
        from omnistage.models.qwen3_omni.rope import rope_index

        merge = config.vision_config.spatial_merge_size
        self._rope = rope_index(config, config.audio_config, merge)

    def prepare(self, data: Any, params: Any) -> Any:
        return self._prompt(list(data.fields["prompt_token_ids"]))

    def probe(self, length: int) -> Any:
        return self._prompt([place * 31 % 200 for place in range(length)])

    def _prompt(self, ids: list[int]) -> Any:
        import numpy as np

        from omnistage.ar.prompt import PreparedPrompt

        own = {
            "positions": self._rope.positions(ids, {}),
            "media": {},
            "media_places": np.zeros(0, np.int64),
        }
        return PreparedPrompt(token_ids=ids, own=own)


def build_thinker(stage: Any, device: str, report: Any) -> Any:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    from omnistage.models.qwen3_omni.thinker import ThinkerModel

    config = config_of(os.environ[SHAPE_VARIABLE])
    module = _paged(make(Thinker, config.thinker_config, device))
    return ThinkerModel(
        module,
        _IdsOnly(config.thinker_config),
        rows=max(stage.max_num_seqs, 3),
        eos_token_ids=frozenset({config.im_end_token_id}),
        max_model_len=stage.max_model_len,
        accept_layer=config.talker_config.accept_hidden_layer,
    )


def build_talker(stage: Any, device: str, report: Any) -> Any:
    import torch
    from transformers import Qwen3OmniMoeTalkerForConditionalGeneration as Talker

    from omnistage.models.qwen3_omni.talker import TalkerModel
    from omnistage.models.qwen3_omni.talker_prompt import TalkerPrompts

    config = config_of(os.environ[SHAPE_VARIABLE])
    module = _paged(make(Talker, config.talker_config, device))
    shape = (
        config.thinker_config.text_config.vocab_size,
        config.talker_config.text_config.hidden_size,
    )
    table = torch.randn(shape, device=device).mul_(0.02).to(module.dtype)
    return TalkerModel(
        module,
        table,
        TalkerPrompts(config, frozenset({config.im_end_token_id})),
        rows=max(stage.max_num_seqs, 3),
        max_model_len=stage.max_model_len,
    )


def build_code2wav(stage: Any, device: str, max_streams: int, report: Any) -> Any:
    from transformers import Qwen3OmniMoeCode2Wav

    from omnistage.ar.generation.options import read_generation_options
    from omnistage.models.qwen3_omni.code2wav import StreamedCode2Wav
    from omnistage.platforms.registry import platform_of

    config = config_of(os.environ[SHAPE_VARIABLE]).code2wav_config
    config._attn_implementation = "sdpa"
    module = make(Qwen3OmniMoeCode2Wav, config, device)
    model = StreamedCode2Wav(module, device=device, max_streams=max_streams)
    platform = platform_of(device)
    if platform.graphs_unavailable_reason() is None and not stage.enforce_eager:
        sizes = read_generation_options(stage).piece_sizes
        model.capture(platform, max_batch=stage.max_num_seqs, sizes=sizes, report=report)
    return model


def _paged(module: Any) -> Any:
    from omnistage.attention.paged import register

    name = register()
    decoder = getattr(module.model, "language_model", module.model)
    decoder.set_attn_implementation(name)
    return module


def omni_config(shape: str, device: str, **settings: Any) -> Any:
    """The resolved three stages, all on one device."""
    from omnistage.config.overrides import Overrides
    from omnistage.config.resolve import resolve_config
    from omnistage.models.qwen3_omni import pipeline as family

    os.environ[SHAPE_VARIABLE] = shape
    pipeline = family.pipeline_config({"enable_audio_output": True})
    for stage, name in enumerate(("build_thinker", "build_talker")):
        pipeline.options[stage]["token_model"] = f"_omni_models:{name}"
    pipeline.options[family.CODE2WAV]["codec_model"] = "_omni_models:build_code2wav"
    return resolve_config(
        pipeline,
        model=shape,
        model_path=os.getcwd(),
        served_model_name=shape,
        overrides=Overrides.from_kwargs(**settings),
        accelerators=() if device == "cpu" else (device,),
    )
