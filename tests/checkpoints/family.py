"""What a family of checkpoints is, and the decorators that declare one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Task = Literal["text-to-image", "image-to-image"]

NEGATIVE_PROMPT = "blurry, low quality"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One pipeline class, and how to build and call a tiny instance of it.

    `call` holds the keyword arguments of one cheap run. It names neither `generator` nor
    `output_type`: those belong to the test. `build` writes a checkpoint into a folder; tests
    want `checkpoint(name)`, which builds once and caches.
    """

    name: str
    pipeline_class: str
    task: Task
    build: Callable[[Path], None]
    call: dict[str, Any]
    notes: str = field(default="", repr=False)


def text_to_image(
    pipeline_class: str, **call: Any
) -> Callable[[Callable[[], DiffusionPipeline]], Family]:
    """Declare the decorated assembler (named as the family) to be a text-to-image family.

    Defaults, which `call` overrides: a prompt, 4 steps, and 32 x 48 pixels, so that a swap of
    height and width cannot go unseen.
    """
    defaults = {"prompt": "a red cat", "num_inference_steps": 4, "height": 32, "width": 48}
    return _declares("text-to-image", pipeline_class, defaults | call)


def image_to_image(
    pipeline_class: str, **call: Any
) -> Callable[[Callable[[], DiffusionPipeline]], Family]:
    """Declare the decorated assembler (named as the family) to be an image-to-image family."""
    defaults = {"prompt": "a red cat", "num_inference_steps": 4, "image": gradient_image(48, 32)}
    return _declares("image-to-image", pipeline_class, defaults | call)


def _declares(
    task: Task, pipeline_class: str, call: dict[str, Any]
) -> Callable[[Callable[[], DiffusionPipeline]], Family]:
    def declare(assemble: Callable[[], DiffusionPipeline]) -> Family:
        def build(folder: Path) -> None:
            from .weights import seeded_pipeline

            seeded_pipeline(assemble).save_pretrained(folder)

        return Family(
            name=assemble.__name__,
            pipeline_class=pipeline_class,
            task=task,
            build=build,
            call=call,
            notes=assemble.__doc__ or "",
        )

    return declare


def gradient_image(width: int, height: int):
    """A PIL picture, the same on every machine, in which no two rows or columns are equal."""
    from PIL import Image

    down = Image.linear_gradient("L")
    channels = down, down.transpose(Image.Transpose.ROTATE_90), Image.radial_gradient("L")
    return Image.merge("RGB", channels).resize((width, height))
