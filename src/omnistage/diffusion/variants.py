"""Picture inputs: which pipeline class of a family takes them, over the same components."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

from omnistage.contracts.errors import InvalidRequestError
from omnistage.diffusion.inputs import DiffusionInputs
from omnistage.diffusion.options import DiffusionOptions
from omnistage.diffusion.signature import signature_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

Task = Literal["Img2Img", "Inpaint"]

_IMAGE_NAMES = ("image", "input_images", "images")
_MASK_NAME = "mask_image"


class PipelineVariants:
    """The loaded pipeline and its siblings, each made once and sharing every component."""

    def __init__(self, pipeline: DiffusionPipeline, options: DiffusionOptions) -> None:
        self.base = pipeline
        self._options = options
        self._made: dict[Task, DiffusionPipeline] = {}

    def choose(self, inputs: DiffusionInputs) -> DiffusionPipeline:
        """The pipeline that takes these inputs. Raises `InvalidRequestError` when none does."""
        self._check_counts(inputs)
        if not inputs.images:
            return self.base
        signature = signature_of(type(self.base))
        takes_images = any(name in signature for name in _IMAGE_NAMES)
        if inputs.masks:
            if takes_images and _MASK_NAME in signature:
                return self.base
            return self._sibling("Inpaint")
        return self.base if takes_images else self._sibling("Img2Img")

    def _check_counts(self, inputs: DiffusionInputs) -> None:
        allowed = self._options.max_images
        name = type(self.base).__name__
        if len(inputs.images) > allowed:
            raise InvalidRequestError(
                f"{name} takes at most {allowed} image(s), got {len(inputs.images)}", param="image"
            )
        if len(inputs.masks) > 1 or (inputs.masks and len(inputs.images) != 1):
            raise InvalidRequestError("a mask needs exactly one image, and no other", param="mask")
        if not inputs.images and self._options.image_input == "required":
            raise InvalidRequestError(f"{name} needs an image to work on", param="image")

    def _sibling(self, task: Task) -> DiffusionPipeline:
        if task not in self._made:
            base_class = type(self.base)
            found = sibling_class(base_class, task)
            if found is None:
                what = "a mask" if task == "Inpaint" else "images"
                raise InvalidRequestError(
                    f"{base_class.__name__} does not take {what}, and diffusers has no "
                    f"{task} pipeline of its family",
                    param="mask" if task == "Inpaint" else "image",
                )
            self._made[task] = share_components(self.base, found)
        return self._made[task]


def image_arguments(pipeline: DiffusionPipeline, inputs: DiffusionInputs) -> dict[str, Any]:
    """The keyword arguments for the pictures of `inputs`, under the pipeline's own names."""
    arguments: dict[str, Any] = {}
    if inputs.images:
        signature = signature_of(type(pipeline))
        name = next(name for name in _IMAGE_NAMES if name in signature)
        as_list = len(inputs.images) > 1 or name != "image"
        images: Image | list[Image] = list(inputs.images) if as_list else inputs.images[0]
        arguments[name] = images
    if inputs.masks:
        arguments[_MASK_NAME] = inputs.masks[0]
    return arguments


def sibling_class(pipeline_class: type, task: Task) -> type | None:
    """The class of the same family for `task`: by diffusers' own tables of automatic pipelines,
    else by its naming (they leave out some families, Chroma for one)."""
    import diffusers
    from diffusers.pipelines import auto_pipeline

    table = {
        "Img2Img": auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        "Inpaint": auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
    }[task]
    for tasks in (
        auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
    ):
        for family, member in tasks.items():
            if member is pipeline_class and family in table:
                found: type = table[family]
                return found
    name = pipeline_class.__name__.removesuffix("Pipeline") + task + "Pipeline"
    return getattr(diffusers, name, None)


def share_components(pipeline: DiffusionPipeline, target: type) -> DiffusionPipeline:
    """A pipeline of class `target` over the components and settings of `pipeline`.

    Raises `InvalidRequestError` when `target` needs a component that `pipeline` lacks.
    (`target.from_pipe` would cast every component to one dtype.)
    """
    parameters = inspect.signature(target).parameters
    settings = {**pipeline.config, **pipeline.components}
    chosen = {name: settings[name] for name in parameters if name in settings}
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in chosen
    ]
    if missing:
        raise InvalidRequestError(
            f"{target.__name__} needs components that this checkpoint lacks: {', '.join(missing)}",
            param="image",
        )
    made = target(**chosen)
    made.set_progress_bar_config(disable=True)
    return made
