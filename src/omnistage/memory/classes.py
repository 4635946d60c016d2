"""From the names in `model_index.json` to classes, importing no more than these classes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omnistage.contracts.errors import (
    CheckpointError,
    MissingDependencyError,
    UnsupportedCombinationError,
)
from omnistage.memory.names import nearest


def named_pipeline_class(class_name: Any, index: Path) -> type:
    """The `diffusers` pipeline class of that name. Raises `CheckpointError` naming the nearest."""
    import diffusers

    if isinstance(class_name, list | tuple):
        raise UnsupportedCombinationError(
            f"{index} names the custom pipeline {class_name[-1]!r}, whose code comes with the "
            "model; only pipeline classes of diffusers are run"
        )
    if not isinstance(class_name, str):
        raise CheckpointError(f"{index} has no _class_name; it must name the pipeline's class")
    known = [name for name in dir(diffusers) if name.endswith("Pipeline")]
    if class_name not in known:
        raise CheckpointError(
            f"{index} names the pipeline class {class_name!r}, which diffusers "
            f"{diffusers.__version__} does not have{_hint(class_name, known)}"
        )
    return _available(getattr(diffusers, class_name), index)


def component_class(component: str, entry: Any, index: Path) -> type:
    """The class that `entry`, a pair of library and class name, stands for.

    Only `diffusers`, `transformers` and the pipeline packages of `diffusers` are imported from: an
    index comes with a model, and importing what it names would run it.
    """
    library_name, class_name = entry
    library = _library(library_name)
    if library is None:
        raise CheckpointError(
            f"{index} takes {component!r} from {library_name!r}; only components of diffusers and "
            "transformers are loaded, never code that comes with a model"
        )
    cls = getattr(library, str(_renamed(library_name, class_name)), None)
    if not isinstance(cls, type):
        raise CheckpointError(
            f"{index} names {class_name!r} for {component!r}, which {library_name} "
            f"{getattr(library, '__version__', '')} does not have{_hint(class_name, dir(library))}"
        )
    cls = _available(cls, index)
    if not _is_loadable(cls, library_name):
        raise CheckpointError(
            f"{index} names {class_name!r} for {component!r}, which is no model, tokenizer, "
            "processor or scheduler that can be loaded from a folder"
        )
    return cls


def _is_loadable(cls: type, library_name: str) -> bool:
    """By diffusers' own list of base classes; of its pipeline packages, models only."""
    import diffusers
    import transformers
    from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES

    library = transformers if library_name == "transformers" else diffusers
    names = [*LOADABLE_CLASSES[library.__name__], "ModelMixin", "PreTrainedModel"]
    bases = [getattr(owner, name, None) for name in names for owner in (library, transformers)]
    bases = [base for base in bases if isinstance(base, type)]
    return issubclass(cls, tuple(bases)) and not issubclass(cls, diffusers.DiffusionPipeline)


def pip_command(package: str) -> str:
    return f"pip install {package}"


def _library(name: Any) -> Any:
    if name == "diffusers":
        import diffusers

        return diffusers
    if name == "transformers":
        import transformers

        return transformers
    from diffusers import pipelines

    return getattr(pipelines, str(name), None)


def _renamed(library_name: str, class_name: str) -> str:
    """Classes that transformers dropped and diffusers maps to their successors."""
    from diffusers.utils import _maybe_remap_transformers_class

    successor = None
    if library_name == "transformers":
        successor = _maybe_remap_transformers_class(class_name)
    return successor or class_name


_PIP_NAMES = {"onnx": "onnxruntime", "note_seq": "note-seq", "k_diffusion": "k-diffusion"}


def _available(cls: type, index: Path) -> type:
    """Both libraries put a dummy in the place of a class whose packages are not installed."""
    backends = getattr(cls, "_backends", None)
    if backends and ".dummy_" in cls.__module__:
        absent = [name for name in backends if not find_spec(name)] or backends
        packages = [_PIP_NAMES.get(name, name) for name in absent]
        raise MissingDependencyError(
            f"{cls.__name__}, which {index} names, needs {' and '.join(packages)}; install with: "
            f"{pip_command(' '.join(packages))}"
        )
    return cls


def _hint(name: Any, known: list[str]) -> str:
    near = nearest(str(name), known)
    return f"; nearest: {near}" if near else ""
