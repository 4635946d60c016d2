"""What `quantization_config` asks for, resolved once: settings by prefix of runtime names.

A runtime name is a component's name and a module's path in it
("transformer.transformer_blocks.0.attn.to_q"). Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.quantization.registry import resolve_method

COMPUTE = ("auto", "bf16", "fp8")
SCALES = ("per_row",)
DEFAULT = "default"
EVERYTHING = ""
"""The prefix of every name, which "default" and a setting without components stand for."""

_METHOD_KEYS = ("method", "quant_method")
_IGNORED_KEYS = ("ignored_layers", "modules_to_not_convert")
OPTIONS = (*_METHOD_KEYS, "compute", "scale", "modulation", *_IGNORED_KEYS)


@dataclass(frozen=True, kw_only=True)
class Fp8Settings:
    """`compute`: "bf16" dequantizes weights and multiplies in the input's dtype, "fp8" multiplies
    float8 by float8 (inputs are scaled by row as they come), "auto" is "fp8" where the device
    does that itself. `modulation`: also the layers that modulate norms, which then always compute
    "bf16". `ignored_layers` are parts of runtime names ("img_mlp")."""

    method: str = "fp8"
    compute: str = "auto"
    scale: str = "per_row"
    modulation: bool = False
    ignored_layers: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether whole parts of the runtime name are one of `ignored_layers`."""
        return any(contains(name, layer) for layer in self.ignored_layers)


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """Settings by prefix; None: full precision. The longest prefix that matches wins."""

    prefixes: Mapping[str, Fp8Settings | None] = field(default_factory=dict)

    def prefix_of(self, name: str) -> str | None:
        """The prefix in force for a runtime name; None: nobody said anything about it."""
        return max((one for one in self.prefixes if has_prefix(name, one)), key=len, default=None)

    def settings_of(self, name: str) -> Fp8Settings | None:
        """None where the name is to stay, or is not spoken of, or is ignored."""
        prefix = self.prefix_of(name)
        settings = None if prefix is None else self.prefixes[prefix]
        return None if settings is None or settings.ignores(name) else settings

    @property
    def is_on(self) -> bool:
        return any(settings is not None for settings in self.prefixes.values())

    @property
    def key(self) -> str:
        """Canonical text: equal for equal plans."""
        plain = {name: one and asdict(one) for name, one in self.prefixes.items()}
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def resolve_quantization(config: str | Mapping[str, Any] | None) -> QuantizationPlan:
    """The plan for a `quantization_config`: None (as the checkpoint is), "none", a method's name,
    a mapping with "method", or a mapping from components, or prefixes in them, to any of these.

    Raises `ConfigurationError` for what is unknown or malformed, naming the nearest, and
    `UnsupportedCombinationError` for methods that are not there yet.
    """
    if config is None:
        return QuantizationPlan()
    if isinstance(config, Mapping) and not any(key in config for key in _METHOD_KEYS):
        return QuantizationPlan(prefixes=_component_map(config))
    return QuantizationPlan(prefixes={EVERYTHING: _settings(config, "quantization_config")})


def _component_map(config: Mapping[str, Any]) -> dict[str, Fp8Settings | None]:
    if not config:
        raise ConfigurationError(
            "quantization_config is an empty mapping; give a method ({'method': 'fp8'}), "
            "components ({'transformer': 'fp8'}), or leave it out"
        )
    stray = sorted(set(config) & set(OPTIONS))
    if stray:
        raise ConfigurationError(
            f"quantization_config has {', '.join(stray)} without a method; add 'method': 'fp8'"
        )
    prefixes: dict[str, Fp8Settings | None] = {}
    for prefix, value in config.items():
        if not isinstance(prefix, str) or not all(prefix.split(".")):
            raise ConfigurationError(
                f"quantization_config has the prefix {prefix!r}; allowed are {DEFAULT!r} and "
                "dotted names such as transformer or transformer.transformer_blocks.0.attn"
            )
        where = EVERYTHING if prefix == DEFAULT else prefix
        prefixes[where] = _settings(value, f"quantization_config.{prefix}")
    return prefixes


def _settings(value: Any, where: str) -> Fp8Settings | None:
    if value is None or isinstance(value, str):
        method = None if value is None else resolve_method(value)
        return None if method is None else Fp8Settings(method=method)
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{where} is {value!r}; allowed are a method's name, a mapping with a method, and null"
        )
    unknown = [key for key in value if key not in OPTIONS]
    if unknown:
        raise ConfigurationError(
            f"{where} has the unknown key {unknown[0]!r}; {suggestion(str(unknown[0]), OPTIONS)}"
        )
    method = resolve_method(_one_of(value, _METHOD_KEYS, where))
    if method is None:
        return None
    return Fp8Settings(
        method=method,
        compute=_choice(value.get("compute", "auto"), COMPUTE, f"{where}.compute"),
        scale=_choice(value.get("scale", "per_row"), SCALES, f"{where}.scale"),
        modulation=_flag(value.get("modulation", False), f"{where}.modulation"),
        ignored_layers=_layers(_one_of(value, _IGNORED_KEYS, where, default=()), where),
    )


_NEEDED = object()


def _one_of(
    value: Mapping[str, Any], keys: tuple[str, ...], where: str, default: Any = _NEEDED
) -> Any:
    """The value of whichever of the keys, which mean the same, is there."""
    given = [key for key in keys if key in value]
    if len(given) > 1:
        raise ConfigurationError(f"{where} has both {' and '.join(given)}; keep one of them")
    if not given and default is _NEEDED:
        raise ConfigurationError(f"{where} names no method; add 'method': 'fp8'")
    found = value[given[0]] if given else default
    if default is _NEEDED and not isinstance(found, str):
        raise ConfigurationError(f"{where}.{given[0]} is {found!r}; it must be a method's name")
    return found


def _choice(value: Any, allowed: tuple[str, ...], where: str) -> str:
    plain = value.lower().replace("-", "_") if isinstance(value, str) else value
    if plain not in allowed:
        raise ConfigurationError(f"{where} is {value!r}; allowed: {', '.join(allowed)}")
    return str(plain)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{where} is {value!r}; allowed: true, false")
    return value


def _layers(value: Any, where: str) -> tuple[str, ...]:
    listed = () if value is None else value
    named = isinstance(listed, list | tuple) and all(isinstance(one, str) for one in listed)
    if not named or not all(all(one.split(".")) for one in listed):
        raise ConfigurationError(
            f"{where}.ignored_layers is {value!r}; it must list layers' names or parts of them "
            "between dots, such as img_mlp"
        )
    return tuple(listed)


def has_prefix(name: str, prefix: str) -> bool:
    """By whole parts: "transformer" is no prefix of "transformer_2"."""
    return not prefix or f"{name}.".startswith(f"{prefix}.")


def contains(name: str, parts: str) -> bool:
    """Whether `parts`, one or several between dots, stand in the dotted name."""
    return f".{parts}." in f".{name}."


def check_names(plan: QuantizationPlan, modules: Mapping[str, Iterable[str]]) -> None:
    """Raises `ConfigurationError`, naming the nearest, for a prefix or an ignored layer that
    nothing in the pipeline is called. `modules` are module paths by component."""
    names = [
        f"{component}.{path}" if path else component
        for component, paths in modules.items()
        for path in ("", *paths)
    ]
    for prefix, settings in plan.prefixes.items():
        if prefix and not any(has_prefix(name, prefix) for name in names):
            raise ConfigurationError(
                f"quantization_config names {prefix!r}, which is nothing in this pipeline; "
                f"{_nearest(prefix, names, modules)}"
            )
        for layer in settings.ignored_layers if settings else ():
            if not any(contains(name, layer) for name in names):
                parts = {part for name in names for part in name.split(".")}
                raise ConfigurationError(
                    f"quantization_config ignores {layer!r}, which no layer of this pipeline is "
                    f"called; {_nearest(layer, [*names, *sorted(parts)], modules)}"
                )


def _nearest(name: str, names: Iterable[str], components: Iterable[str]) -> str:
    hint = suggestion(name, names)
    return hint if hint.startswith("did") else f"its components are: {', '.join(components)}"


def check_precision(plan: QuantizationPlan, component: str, layers: Iterable[str]) -> None:
    """Whether a component whose checkpoint stores `layers` (paths in it) in float8 may be loaded.

    Raises `UnsupportedCombinationError` where the plan asks for full precision in its place.
    """
    for layer in layers:
        name = f"{component}.{layer}"
        if plan.prefix_of(name) is not None and plan.settings_of(name) is None:
            raise UnsupportedCombinationError(
                f"the checkpoint stores {name} as fp8, and quantization_config asks for full "
                "precision there; use a checkpoint in full precision, or ask for fp8 there"
            )
