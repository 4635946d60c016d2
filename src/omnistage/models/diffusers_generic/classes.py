"""What can be told of a `diffusers` pipeline class from its name alone (surveyed over 0.42).

The registry must not import the classes: that takes seconds, and torch.
"""

from __future__ import annotations

import re

_VIDEO = re.compile(
    r"Allegro|AnimateDiff|AnyFlow|ChronoEdit|CogVideoX|ConsisID|Cosmos(?!2TextToImage)|EasyAnimate"
    r"|Helios|HunyuanSkyreels|HunyuanVideo|I2VGenXL|Kandinsky5(I2V|T2V)|Kandinsky6|LTX|Latte|Lucy"
    r"|Mochi|MotifVideo|PIA|Sana(Video|ImageToVideo|WM)|SkyReels|StableVideo|TextToVideo"
    r"|VideoToVideo|Wan"
)
_AUDIO = re.compile(
    r"AceStep|AudioDiffusion|AudioLDM|DanceDiffusion|LongCatAudio|MusicLDM|Spectrogram|StableAudio"
)
_NO_PICTURE = re.compile(
    r"DiffusionGemma|LLaDA2|RFD4|Marigold|ShapE|StableDiffusionLDM3D|UniDiffuser"
    r"|(Kandinsky|KandinskyV22|StableCascade|Wuerstchen|Flux)Prior\w*"
)
_NEEDS_PICTURE = re.compile(
    r"Img2Img|I2I|Inpaint|Edit|Pix2Pix|Upscale|SuperResolution|ImageVariation|Depth2Img|Refiner"
    r"|FluxFill|QwenImageLayered|VisualCloze"
)

TAKES_SEVERAL_PICTURES = frozenset(
    {
        "Flux2KleinKVPipeline",
        "Flux2KleinPipeline",
        "Flux2Pipeline",
        "GlmImagePipeline",
        "JoyImageEditPlusPipeline",
        "OmniGenPipeline",
        "QwenImageEditPlusPipeline",
        "ZImageOmniPipeline",
    }
)
"""A list of pictures is several references for one result there; elsewhere it is a batch."""

_GUIDED_BY_NEGATIVE_PROMPT = re.compile(r"QwenImage(?!21)\w*")


def output_kind(class_name: str) -> str:
    """ "image", "video", "audio" or "other". Unknown classes are taken to make pictures."""
    for kind, pattern in (("video", _VIDEO), ("audio", _AUDIO), ("other", _NO_PICTURE)):
        if pattern.match(class_name):
            return kind
    return "image"


def needs_picture(class_name: str) -> bool:
    """Whether the class has nothing to do without a picture (its call does not say so)."""
    return _NEEDS_PICTURE.search(class_name) is not None


def default_sampling_params(class_name: str) -> dict[str, object]:
    """Where the defaults of the class's own call do not give what its authors recommend.

    Qwen-Image guides with `true_cfg_scale` 4 by default, but only beside a negative prompt; its
    model card passes a blank one.
    """
    if _GUIDED_BY_NEGATIVE_PROMPT.fullmatch(class_name):
        return {"extra_args": {"negative_prompt": " "}}
    return {}
