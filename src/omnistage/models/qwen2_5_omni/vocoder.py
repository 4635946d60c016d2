"""How far a sample of the vocoder looks around in its spectrogram."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any


def reach_frames(vocoder: Any) -> int:
    """Mel frames before and behind a frame that its samples of a `Qwen2_5OmniToken2WavBigVGANModel`
    may depend on, at most: from its last layer back to its first."""
    reach = Fraction(_reach_of(vocoder.conv_post) + _reach_of_activation(vocoder.activation_post))
    count = vocoder.num_residual_blocks
    for level in reversed(range(vocoder.num_upsample_layers)):
        blocks = vocoder.resblocks[level * count : (level + 1) * count]
        reach += max(_reach_of_block(block) for block in blocks)
        (up,) = vocoder.ups[level]
        reach = (reach + up.kernel_size[0] - up.padding[0]) / up.stride[0]
    return ceil(reach + _reach_of(vocoder.conv_pre))


def _reach_of(convolution: Any) -> int:
    return int(convolution.dilation[0] * (convolution.kernel_size[0] - 1) // 2)


def _reach_of_activation(activation: Any) -> int:
    """Upsampled by two, bent, downsampled by two: each filter is as long as its kernel."""
    down, up = activation.downsample, activation.upsample
    return ceil(
        Fraction(down.kernel_size, 2 * down.stride) + Fraction(up.kernel_size, 2 * up.ratio)
    )


def _reach_of_block(block: Any) -> int:
    convolutions = [*block.convs1, *block.convs2]
    reach = sum(_reach_of(one) for one in convolutions)
    return reach + sum(_reach_of_activation(one) for one in block.activations)
