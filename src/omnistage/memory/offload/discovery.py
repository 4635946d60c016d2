"""What of a pipeline can be offloaded: its components by part, and the blocks of a module in the
order in which it runs them.

A pipeline, or the model folder that serves it, may declare either; else both are told from names
that are conventions of `diffusers` and `transformers` (surveyed over diffusers 0.42). Nothing here
reads a weight, and the modules may be skeletons on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

DENOISER_NAME = re.compile(
    r"((\w+_)?(transformer|unet|dit)(_\d+)?)|prior|prior_prior|decoder|super_res_(first|last)"
)
AUTOENCODER_NAMES = ("vae", "movq", "vqgan", "vqvae", "audio_vae")
BLOCK_LIST_NAME = re.compile(r"(\w+_)?(blocks?|layers?)|resblocks|h")
"""How modules name their lists of blocks where they say nothing else of them."""

FALLBACK_NAMES = ("language_model", "model")
"""Denoisers of pipelines that have no `components`."""


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """Declared on a pipeline class as `_offload_plan`, or by a model folder.

    `block_attrs` maps a component to paths of its lists of blocks, in the order in which they run;
    a path may also name one module. `offload_submodules` maps a path in a denoiser to the list of
    blocks inside it, run before the others. Blocks at or below a path of `resident_paths`
    ("transformer.blocks.0") always stay on the device.
    """

    block_attrs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    offload_submodules: Mapping[str, str] = field(default_factory=dict)
    resident_paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OffloadComponents:
    """Modules of a pipeline by dotted path; a module is in one of these only."""

    denoisers: dict[str, nn.Module]
    encoders: dict[str, nn.Module]
    autoencoders: dict[str, nn.Module]
    resident: dict[str, nn.Module]

    def all(self) -> dict[str, nn.Module]:
        return self.denoisers | self.encoders | self.autoencoders | self.resident


_DECLARATIONS = {
    "denoisers": "_dit_modules",
    "encoders": "_encoder_modules",
    "autoencoders": "_vae_modules",
    "resident": "_resident_modules",
}


def plan_of(pipeline: Any) -> OffloadPlan | None:
    """What the class of a pipeline declares; also of the class itself."""
    plan = getattr(_class_of(pipeline), "_offload_plan", None)
    assert plan is None or isinstance(plan, OffloadPlan), "_offload_plan must be an OffloadPlan"
    return plan


def find_components(pipeline: Any) -> OffloadComponents:
    """Raises `ConfigurationError` for a declared path that leads to no module."""
    declared = {
        part: {path: resolve(pipeline, path) for path in getattr(type(pipeline), attribute, ())}
        for part, attribute in _DECLARATIONS.items()
    }
    if not any(declared.values()):
        declared = {part: {} for part in _DECLARATIONS}
        for name, module in named_components(pipeline).items():
            declared[part_of(name)][name] = module
    return OffloadComponents(**declared)


def named_components(pipeline: Any) -> dict[str, nn.Module]:
    """The modules that a pipeline calls its components, else those that it has as attributes."""
    from torch import nn

    components = getattr(pipeline, "components", None)
    if not isinstance(components, Mapping):
        components = dict(vars(pipeline)) | vars(pipeline).get("_modules", {})
    return {name: part for name, part in components.items() if isinstance(part, nn.Module)}


def part_of(name: str, pipeline: Any = None) -> str:
    """ "denoisers", "autoencoders" or "encoders": what a component of that name is.

    Where the class of `pipeline`, which may be the class itself, declares its components, that
    decides instead: a component counts as what is declared of it, else of the first part declared
    inside it; one of which nothing is declared is "resident".
    """
    cls = _class_of(pipeline)
    declared = {part: tuple(getattr(cls, one, ())) for part, one in _DECLARATIONS.items()}
    if any(declared.values()):
        exact = [part for part, paths in declared.items() if name in paths]
        inside = [part for part, paths in declared.items() if _is_above(name, paths)]
        return (exact or inside or ["resident"])[0]
    if DENOISER_NAME.fullmatch(name) or name in FALLBACK_NAMES:
        return "denoisers"
    return "autoencoders" if name in AUTOENCODER_NAMES else "encoders"


def resolve(pipeline: Any, path: str) -> nn.Module:
    """The module at a dotted path of a pipeline. Raises `ConfigurationError` when none is there."""
    from torch import nn

    found: Any = pipeline
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, nn.Module):
        raise ConfigurationError(
            f"{type(pipeline).__name__} has no module at {path!r}; its modules are: "
            + (", ".join(named_components(pipeline)) or "none")
        )
    return found


def streamable_blocks(
    module: nn.Module,
    component: str = "",
    plan: OffloadPlan | None = None,
    part: str | None = None,
) -> list[str]:
    """Paths of the blocks of `module` that may stream, in the order in which they run: outermost,
    disjoint, each with weights of its own. Empty where none is known.

    Sources, the first that says something: `plan`; the module's `_layerwise_offload_blocks_attrs`;
    the three parts of a UNet; the classes in `_no_split_modules` and `_repeated_blocks`; lists that
    are named as lists of blocks are. `part` is what the component is, if not what its name says.
    Raises `ConfigurationError` for a declared path that is wrong.
    """
    paths = _declared_blocks(module, component, plan, part or part_of(component))
    if paths is None:
        paths = _unet_blocks(module) or _blocks_by_class(module) or _blocks_by_name(module)
    resident = plan.resident_paths if plan is not None else ()
    return [
        path
        for path in _with_weights(module, paths)
        if not _is_at_or_below(f"{component}.{path}", resident)
    ]


def _declared_blocks(
    module: nn.Module, component: str, plan: OffloadPlan | None, part: str
) -> list[str] | None:
    inner = [
        f"{path}.{attribute}"
        for path, attribute in (plan.offload_submodules if plan is not None else {}).items()
        if part == "denoisers"
    ]
    attributes = plan.block_attrs.get(component) if plan is not None else None
    if attributes is None:
        attributes = getattr(module, "_layerwise_offload_blocks_attrs", None)
    if attributes is None:
        single = getattr(module, "_layerwise_offload_blocks_attr", None)
        attributes = (single,) if single else None
    if attributes is None:
        return None
    return [path for attribute in (*inner, *attributes) for path in _entries(module, attribute)]


def _entries(module: nn.Module, attribute: str) -> list[str]:
    from torch import nn

    try:
        found = module.get_submodule(attribute)
    except AttributeError as error:
        raise ConfigurationError(
            f"{type(module).__name__} has no blocks at {attribute!r}, which its offload plan "
            f"declares; its modules are: {', '.join(name for name, _ in module.named_children())}"
        ) from error
    if isinstance(found, nn.ModuleList | nn.Sequential):
        return [f"{attribute}.{name}" for name, _ in found.named_children()]
    return [attribute]


def _unet_blocks(module: nn.Module) -> list[str]:
    children = dict(module.named_children())
    if not {"down_blocks", "up_blocks"} <= children.keys():
        return []
    names = [name for name in ("down_blocks", "mid_block", "up_blocks") if name in children]
    return [path for name in names for path in _entries(module, name)]


def _blocks_by_class(module: nn.Module) -> list[str]:
    """Entries of lists whose class the module names; other modules of these classes (patch
    embeddings, projections) are no blocks."""
    names: set[str] = set()
    for owner in module.modules():
        names.update(getattr(owner, "_repeated_blocks", None) or ())
        names.update(getattr(owner, "_no_split_modules", None) or ())
    return [
        f"{path}.{name}"
        for path, blocks in _outermost_lists(module, lambda entry: _is_one(entry, names))
        for name, entry in blocks.named_children()
        if _is_one(entry, names)
    ]


def _is_one(entry: nn.Module, names: set[str]) -> bool:
    """Whether it is a block of these classes, or a wrapper of exactly one."""
    if type(entry).__name__ in names:
        return True
    return sum(type(part).__name__ in names for part in entry.modules()) == 1


def _blocks_by_name(module: nn.Module) -> list[str]:
    return [
        f"{path}.{name}"
        for path, blocks in _outermost_lists(module, lambda entry: True)
        if BLOCK_LIST_NAME.fullmatch(path.rpartition(".")[2]) and len(blocks) > 1
        for name, _ in blocks.named_children()
    ]


def _outermost_lists(module: nn.Module, holds: Any) -> Iterator[tuple[str, nn.ModuleList]]:
    from torch import nn

    inside: tuple[str, ...] = ()
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or _is_at_or_below(path, inside):
            continue
        if any(holds(entry) for entry in part):
            inside = (*inside, path)
            yield path, part


def _with_weights(module: nn.Module, paths: list[str]) -> list[str]:
    """Those that own weights; for a list, which nobody calls, its entries."""
    from torch import nn

    found: list[str] = []
    for path in dict.fromkeys(paths):
        block = module.get_submodule(path)
        if isinstance(block, nn.ModuleList):
            inner = [f"{path}.{name}" for name, _ in block.named_children()]
            found += _with_weights(module, inner)
        elif any(True for _ in block.parameters()):
            found.append(path)
    return found


def _class_of(pipeline: Any) -> type:
    return pipeline if isinstance(pipeline, type) else type(pipeline)


def _is_above(root: str, paths: tuple[str, ...]) -> bool:
    return any(path.startswith(f"{root}.") for path in paths)


def _is_at_or_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)
