"""What names of pipeline classes tell, against the source of the installed diffusers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from omnistage.models.diffusers_generic.classes import (
    TAKES_SEVERAL_PICTURES,
    default_sampling_params,
    needs_picture,
    output_kind,
)
from tests.checkpoints import FAMILIES

OUTPUT_FIELDS = {"images": "image", "image": "image", "frames": "video", "audios": "audio"}


def call_methods(folder: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(class name, `__call__`) of every pipeline in the source, read without importing it."""
    for path in sorted(folder.rglob("pipeline_*.py")):
        if "deprecated" in path.parts or "_onnx_" in path.name:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Pipeline"):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name == "__call__":
                        yield node.name, item


@pytest.fixture(scope="module")
def calls() -> dict[str, ast.FunctionDef]:
    origin = find_spec("diffusers").origin
    found = dict(call_methods(Path(origin).parent / "pipelines"))
    assert len(found) > 150
    return found


def parameters(call: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*call.args.args, *call.args.kwonlyargs)}


def output_keywords(call: ast.FunctionDef) -> set[str]:
    """Names of the fields with which the call builds its output object."""
    return {
        keyword.arg
        for node in ast.walk(call)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.endswith("Output")
        for keyword in node.keywords
    }


def test_the_kind_of_output_agrees_with_what_each_class_returns(calls):
    wrong = {}
    for name, call in calls.items():
        kinds = {OUTPUT_FIELDS[field] for field in output_keywords(call) & OUTPUT_FIELDS.keys()}
        kind = output_kind(name)
        makes_objects = kind == "other" and kinds == {"image"}  # Shap-E renders its objects
        if kinds and kind not in kinds and not makes_objects:
            wrong[name] = (kind, kinds)
    assert wrong == {}


def test_everything_that_counts_frames_is_video(calls):
    names = [name for name, call in calls.items() if "num_frames" in parameters(call)]
    assert len(names) > 40
    assert [name for name in names if output_kind(name) not in ("video", "audio")] == []


def test_classes_that_cannot_do_without_a_picture_are_known(calls):
    """A parameter `image` without a default is one that must be given."""
    missed = []
    for name, call in calls.items():
        required = call.args.args[: len(call.args.args) - len(call.args.defaults)]
        must = "image" in {argument.arg for argument in required}
        if must and output_kind(name) == "image" and not needs_picture(name):
            missed.append(name)
    assert missed == []


def test_classes_that_need_a_picture_take_one(calls):
    takes = {"image", "images", "input_images", "control_image", "task_prompt", "content_prompt"}
    named = [name for name in calls if needs_picture(name) and output_kind(name) == "image"]
    assert len(named) > 40
    assert [name for name in named if not parameters(calls[name]) & takes] == []


def test_classes_that_take_several_pictures_exist(calls):
    assert set(calls) >= TAKES_SEVERAL_PICTURES


def test_text_to_image_families_need_no_picture():
    for family in FAMILIES.values():
        assert output_kind(family.pipeline_class) == "image"
        if family.task == "text-to-image":
            assert not needs_picture(family.pipeline_class)


def test_a_blank_negative_prompt_is_given_to_those_that_guide_with_one(calls):
    for name, call in calls.items():
        if default_sampling_params(name):
            assert {"negative_prompt", "true_cfg_scale"} <= parameters(call), name
    assert default_sampling_params("QwenImagePipeline")
    assert not default_sampling_params("FluxPipeline")
