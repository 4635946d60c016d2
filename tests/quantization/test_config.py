"""`quantization_config` in all its forms."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.quantization.config import (
    Fp8Settings,
    QuantizationPlan,
    check_names,
    check_precision,
    resolve_quantization,
)

LAYER = "transformer.transformer_blocks.0.attn.to_q"


def test_nothing_said_is_no_plan_and_none_is_one():
    assert resolve_quantization(None) == QuantizationPlan()
    assert resolve_quantization(None).prefix_of(LAYER) is None
    off = resolve_quantization("none")
    assert off.prefix_of(LAYER) == ""
    assert off.settings_of(LAYER) is None
    assert not off.is_on


@pytest.mark.parametrize(
    "config", ["fp8", {"method": "FP8"}, {"quant_method": "float8"}, {"default": "fp8"}]
)
def test_one_method_for_everything(config):
    plan = resolve_quantization(config)
    assert plan.is_on
    assert plan.settings_of(LAYER) == Fp8Settings()
    assert plan.key == resolve_quantization("fp8").key


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_options_of_a_method(key):
    plan = resolve_quantization({"method": "fp8", "compute": "BF16", key: ["img_mlp"]})
    settings = plan.settings_of(LAYER)
    assert settings == Fp8Settings(compute="bf16", ignored_layers=("img_mlp",))
    assert plan.settings_of("transformer.transformer_blocks.0.img_mlp.net.0.proj") is None
    assert plan.settings_of("transformer.transformer_blocks.0.img_mlp_2.proj") == settings


@pytest.mark.invariant("QUANT-INV-004")
def test_the_longest_prefix_wins():
    plan = resolve_quantization(
        {
            "transformer": {"method": "fp8", "compute": "bf16"},
            "transformer.transformer_blocks.1": None,
            "transformer.transformer_blocks.1.attn": "fp8",
            "vae": None,
        }
    )
    in_block = "transformer.transformer_blocks."
    assert plan.settings_of(LAYER) == Fp8Settings(compute="bf16")
    assert plan.settings_of(f"{in_block}1.ff.net") is None
    assert plan.settings_of(f"{in_block}1.attn.to_q") == Fp8Settings()
    assert plan.settings_of(f"{in_block}10.ff.net") == Fp8Settings(compute="bf16")


@pytest.mark.invariant("QUANT-INV-004")
def test_what_no_prefix_matches_falls_through_to_default_or_is_left_alone():
    config = {"transformer": "fp8"}
    assert resolve_quantization(config).prefix_of("transformer_2.blocks.0") is None
    plan = resolve_quantization(config | {"default": {"method": "fp8", "compute": "fp8"}})
    assert plan.settings_of("transformer_2.blocks.0") == Fp8Settings(compute="fp8")
    assert plan.settings_of(LAYER) == Fp8Settings()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "empty mapping"),
        ({"compute": "fp8"}, "compute without a method"),
        ({"method": 8}, "quantization_config.method is 8"),
        ({"method": "fp8", "compue": "fp8"}, "unknown key 'compue'; did you mean 'compute'"),
        ({"method": "fp8", "compute": "int4"}, "compute is 'int4'; allowed: auto, bf16, fp8"),
        ({"method": "fp8", "modulation": "yes"}, "modulation is 'yes'; allowed: true, false"),
        ({"method": "fp8", "scale": "per_block"}, "allowed: per_row"),
        ({"method": "fp8", "quant_method": "fp8"}, "has both method and quant_method"),
        ({"method": "fp8", "ignored_layers": "img_mlp"}, "must list layers' names"),
        ({"method": "fp8", "ignored_layers": [""]}, "must list layers' names"),
        ({"transformer": {"compute": "fp8"}}, "quantization_config.transformer names no method"),
        ({"transformer": 8}, "quantization_config.transformer is 8"),
        ({"transformer..x": "fp8"}, r"the prefix 'transformer\.\.x'"),
        ({"transformer": "fp9"}, "did you mean 'fp8'"),
    ],
)
def test_what_is_malformed_says_where_and_what_is_allowed(config, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve_quantization(config)


@pytest.mark.invariant("QUANT-INV-002")
def test_a_method_to_come_is_refused_inside_a_map_too():
    with pytest.raises(UnsupportedCombinationError, match="int8"):
        resolve_quantization({"transformer": {"method": "int8"}})


MODULES = {
    "transformer": ["transformer_blocks", "transformer_blocks.0", "transformer_blocks.0.img_mlp"],
    "vae": ["decoder"],
}


@pytest.mark.invariant("QUANT-INV-004")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"transfomer": "fp8"}, "'transfomer', which is nothing.*did you mean 'transformer'"),
        ({"zzz": None}, "its components are: transformer, vae"),
        ({"transformer.transformer_blocks.7": None}, "did you mean 'transformer.transformer_blo"),
        ({"method": "fp8", "ignored_layers": ["img_mpl"]}, "ignores 'img_mpl'.*'img_mlp'"),
    ],
)
def test_names_that_are_nothing_in_the_pipeline_are_errors(config, message):
    with pytest.raises(ConfigurationError, match=message):
        check_names(resolve_quantization(config), MODULES)


def test_names_that_are_something_pass():
    check_names(resolve_quantization({"vae": None, "default": "fp8"}), MODULES)
    ignored = {"method": "fp8", "ignored_layers": ["img_mlp", "transformer.transformer_blocks.0"]}
    check_names(resolve_quantization(ignored), MODULES)


@pytest.mark.invariant("QUANT-INV-001")
@pytest.mark.parametrize(
    "config",
    ["none", {"transformer": None}, {"method": "fp8", "ignored_layers": ["to_q"]}],
)
def test_full_precision_asked_of_stored_float8_is_an_error(config):
    layer = LAYER.removeprefix("transformer.")
    with pytest.raises(UnsupportedCombinationError, match=f"{LAYER} as fp8"):
        check_precision(resolve_quantization(config), "transformer", [layer])
    for agreeing in (None, "fp8", {"vae": None}):
        check_precision(resolve_quantization(agreeing), "transformer", [layer])


def test_resolving_needs_no_torch():
    code = (
        "import sys, omnistage.quantization.config as c; c.resolve_quantization('fp8'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
