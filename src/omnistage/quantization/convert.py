"""Puts float8 layers in the place of linear ones: while weights are loaded, or before."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from omnistage.contracts.errors import CheckpointError, ConfigurationError
from omnistage.quantization.config import (
    Fp8Settings,
    QuantizationPlan,
    check_names,
    has_prefix,
)
from omnistage.quantization.fp8 import VERSION, Fp8Linear, resolve_compute
from omnistage.quantization.layers import block_layers, select_layers


class Fp8Transform:
    """Quantizes the layers of one component that a plan chooses, as their blocks are loaded.

    Works in place on whatever device the weights are, also on the meta device, where names,
    shapes and dtypes come out as they do with weights. A layer at a time: no more than one is held
    twice. `device` is where the component will run and `float8` whether that multiplies float8
    itself; they decide what "auto" computes in.
    """

    def __init__(
        self, component: str, plan: QuantizationPlan, *, device: str, float8: bool
    ) -> None:
        self.component, self._plan = component, plan
        self._device, self._float8 = device, float8
        self._chosen: WeakKeyDictionary[nn.Module, dict[str, Fp8Settings]] = WeakKeyDictionary()
        digest = hashlib.sha256(plan.key.encode()).hexdigest()
        self.key = f"fp8-rows-{VERSION}-{component}-{digest}"

    def __call__(self, module: nn.Module, path: str = "") -> None:
        """Convert at and below `path` of the component; "" is all of it. Raises `CheckpointError`
        for a weight that is not finite."""
        made: dict[nn.Module, nn.Module] = {}
        for name, settings in self._layers(module).items():
            if not has_prefix(name, path):
                continue
            linear = module.get_submodule(name)
            if isinstance(linear, nn.Linear) and linear not in made:  # not by another name
                made[linear] = self._quantized(linear, settings, name)
        replace_layers(module, made)
        if not path:
            check_module_dtype(module, self.component)

    def _layers(self, module: nn.Module) -> dict[str, Fp8Settings]:
        """Chosen when the module is first seen, for all calls: a walk over a large one takes long,
        and there is one call a block."""
        if module not in self._chosen:
            self._chosen[module] = select_layers(module, self._plan, self.component)
        return self._chosen[module]

    def _quantized(self, linear: nn.Linear, settings: Fp8Settings, name: str) -> Fp8Linear:
        compute = resolve_compute(settings.compute, self._device, float8=self._float8)
        made = Fp8Linear.from_linear(linear, compute=compute)
        if not made.weight_scale.is_meta and not bool(torch.isfinite(made.weight_scale).all()):
            raise CheckpointError(
                f"{self.component}.{name} has weights that are infinite or no numbers; they cannot "
                "be quantized"
            )
        return made


def convert_module(
    module: nn.Module,
    plan: QuantizationPlan,
    component: str,
    *,
    device: str = "cpu",
    float8: bool = False,
) -> None:
    """Quantize a loaded component in place. See `Fp8Transform`."""
    Fp8Transform(component, plan, device=device, float8=float8)(module)


def make_transforms(
    plan: QuantizationPlan, modules: Mapping[str, nn.Module], *, device: str, float8: bool
) -> dict[str, Fp8Transform]:
    """A transform for every component with layers to quantize. `modules` are all models of the
    pipeline by component, with or without weights; those of quantized checkpoints have their
    float8 layers already and get none.

    Raises `ConfigurationError` for names that are nothing in the pipeline and for a setting under
    which no layer would be quantized.
    """
    check_names(
        plan,
        {
            name: [path for path, _ in part.named_modules() if path]
            for name, part in modules.items()
        },
    )
    chosen: dict[str, Fp8Transform] = {}
    reached: Counter[str] = Counter()
    for component, module in modules.items():
        stored = quantized_layers(module)
        layers = stored or select_layers(module, plan, component)
        reached.update(str(plan.prefix_of(f"{component}.{path}")) for path in layers)
        if layers and not stored:
            chosen[component] = Fp8Transform(component, plan, device=device, float8=float8)
    for prefix, settings in plan.prefixes.items():
        if settings is not None and not reached[prefix]:
            raise ConfigurationError(
                f"quantization_config asks for {settings.method} in {prefix or 'this pipeline'}, "
                "where no layer can be quantized: only linear layers inside the repeated blocks of "
                "denoisers and text encoders can, except norms and modulation"
            )
    return chosen


def as_skeleton(
    module: nn.Module,
    scale_shapes: Mapping[str, tuple[int, ...]],
    plan: QuantizationPlan,
    component: str,
    *,
    device: str = "cpu",
    float8: bool = False,
) -> None:
    """Make the layers of a module without weights float8 ones, in place, so that a quantized
    checkpoint fits it. `scale_shapes` are what it stores, by path.

    Raises `CheckpointError` for a path at which there is no linear layer.
    """
    made: dict[nn.Module, nn.Module] = {}
    for path, shape in scale_shapes.items():
        linear = _linear_at(module, path, component)
        settings = plan.settings_of(f"{component}.{path}") or Fp8Settings()
        compute = resolve_compute(settings.compute, device, float8=float8)
        made[linear] = Fp8Linear.empty_like(linear, shape, compute=compute)
    replace_layers(module, made)
    check_module_dtype(module, component)


def _linear_at(module: nn.Module, path: str, component: str) -> nn.Linear:
    try:
        found = module.get_submodule(path)
    except AttributeError:
        found = None
    if type(found) is not nn.Linear:
        what = "nothing of that name" if found is None else f"a {type(found).__name__}"
        raise CheckpointError(
            f"the checkpoint stores {component}.{path} in float8 with a scale, but a "
            f"{type(module).__name__} has {what} there; only linear layers can be quantized"
        )
    return found


def replace_layers(module: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> None:
    """The keys by the values, under every name that they have."""
    for parent in list(module.modules()) if layers else ():
        for name, child in list(parent.named_children()):
            if child in layers:
                setattr(parent, name, layers[child])


def check_module_dtype(module: nn.Module, component: str) -> None:
    """Libraries cast inputs to `module.dtype`, the dtype of the first parameter: that must not be
    a quantized layer's."""
    dtype = getattr(module, "dtype", None)
    if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and dtype.is_floating_point:
        raise ConfigurationError(
            f"{component} ({type(module).__name__}) begins with a quantized layer, so that its "
            "inputs would be cast to float8; add that layer to ignored_layers"
        )


def quantized_layers(module: nn.Module) -> dict[str, Fp8Linear]:
    """By path."""
    return {path: part for path, part in module.named_modules() if isinstance(part, Fp8Linear)}


def describe(module: nn.Module) -> dict[str, Any]:
    """For logs: "layers" that are float8, their "bytes", layers by "compute" (a layer whose sides
    do not fit float8 products computes in bf16), and how many in blocks are "kept"."""
    layers = list(quantized_layers(module).values())
    kept = sum(isinstance(layer, nn.Linear) for _, layer in block_layers(module))
    return {
        "layers": len(layers),
        "bytes": sum(tensor.nbytes for layer in layers for tensor in layer.parameters()),
        "compute": dict(Counter(layer.compute for layer in layers)),
        "kept": kept,
    }
