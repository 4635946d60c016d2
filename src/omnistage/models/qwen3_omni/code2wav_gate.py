"""The gate of the streamed codec decoder: it is decoded in pieces only where that is known, and
shown at load, to be the one-pass decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from omnistage.models.qwen3_omni.code2wav import StreamedCode2Wav

_KNOWN = (
    frozenset(
        "Qwen3OmniMoe" + name
        for name in (
            "Code2Wav",
            "Code2WavTransformerModel",
            "Code2WavTransformerLayer",
            "Code2WavAttention",
            "Code2WavMlp",
            "Code2WavRMSNorm",
            "Code2WavLayerScale",
            "RMSNorm",
            "RotaryEmbedding",
            "CausalConvNet",
            "CausalTransConvNet",
            "ConvNeXtBlock",
            "Code2WavDecoderBlock",
            "Code2WavDecoderResidualUnit",
            "SnakeBeta",
        )
    )
    | {"ModuleList", "Linear", "LayerNorm", "Identity", "Embedding", "GELU", "Conv1d"}
    | {
        "ConvTranspose1d",
        "SiLU",
        "SiLUActivation",
        "GELUActivation",
    }
)
_ATTENTION = ("sdpa", "eager")


def is_kind(part: nn.Module, name: str) -> bool:
    return type(part).__name__ == "Qwen3OmniMoe" + name


def check_modules(module: nn.Module) -> None:
    """Raises `UnsupportedCombinationError` for layers whose state nobody here carries on."""
    kinds = {type(part).__name__ for part in module.modules()}
    if unknown := sorted(kinds - _KNOWN):
        raise UnsupportedCombinationError(
            f"the codec decoder holds {', '.join(unknown)}, of which it is not known what a "
            "stream must carry on; it cannot be decoded in pieces"
        )
    config = module.config
    if set(config.layer_types) != {"sliding_attention"}:
        raise UnsupportedCombinationError(
            f"the codec decoder's layer_types are {sorted(set(config.layer_types))}; only "
            "'sliding_attention' has state of bounded size"
        )
    if config._attn_implementation not in _ATTENTION:
        raise UnsupportedCombinationError(
            f"the codec decoder's attention is {config._attn_implementation!r}; "
            f"in pieces it takes a mask: use one of {', '.join(_ATTENTION)}"
        )
    for name, part in module.named_modules():
        if is_kind(part, "CausalConvNet") and part.stride != 1:
            raise UnsupportedCombinationError(f"{name} has stride {part.stride}; allowed is 1")
        if is_kind(part, "CausalTransConvNet"):
            kernel, stride = part.conv.kernel_size[0], part.conv.stride[0]
            if kernel not in (stride, 2 * stride):
                raise UnsupportedCombinationError(
                    f"{name} has kernel {kernel} and stride {stride}; the kernel must be the "
                    "stride or twice the stride"
                )


PROBE_PIECES = (1, 2, 5)
"""Frames; from the third on all context is in use but the attention window's far end."""


def check_against_one_pass(model: StreamedCode2Wav) -> float:
    """Decode random codes in pieces and at once, and the transformer alone beyond its window.

    Returns the largest difference, relative to the peak. Raises `UnsupportedCombinationError` above
    what rounding explains.
    """
    import torch

    with torch.no_grad():
        worst = max(_wave_difference(model), _transformer_difference(model))
    allowed = tolerance(model.module)
    if not worst <= allowed:
        raise UnsupportedCombinationError(
            f"the codec decoder in pieces differs from one pass by {worst:.2g} of the peak; "
            f"rounding explains {allowed:.2g}. This version of transformers computes something else"
        )
    return worst


def tolerance(module: nn.Module) -> float:
    """cuDNN rounds to TF32 in float32 convolutions, unless told otherwise."""
    if module.dtype.itemsize < 4:
        return 0.1
    return 1e-2 if module.device.type == "cuda" else 1e-4


def _wave_difference(model: StreamedCode2Wav) -> float:
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (1, sum(PROBE_PIECES), model.num_codebooks)
    codes = torch.randint(model.codebook_size, shape, generator=generator).to(model.module.device)
    at_once = model.module(codes.transpose(1, 2))[0, 0].float()
    stream = model.begin(("probe", 0))
    try:
        pieces = [
            model.decode([stream], piece, [piece.shape[1]])[0]
            for piece in codes.split(PROBE_PIECES, dim=1)
        ]
    finally:
        model.release(stream)
    return _relative(torch.cat(pieces), at_once)


def _transformer_difference(model: StreamedCode2Wav) -> float:
    import torch

    module, window = model.module, model.attention.window
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn((1, window + 8, module.config.hidden_size), generator=generator)
    hidden = hidden.to(module.device, module.dtype)
    at_once = module.pre_transformer(inputs_embeds=hidden).last_hidden_state
    pieces = model.attention.transform(hidden.split((window - 2, 1, 9), dim=1))
    return _relative(pieces, at_once)


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    peak = max(float(wanted.abs().max()), 1e-6)
    return float((found - wanted).abs().max()) / peak
