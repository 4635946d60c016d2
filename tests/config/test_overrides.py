"""Overrides as text: dotted flags, one JSON value, and the shell's strings."""

from __future__ import annotations

import pytest

from omnistage.config.overrides import Overrides, is_override_flag
from omnistage.contracts.errors import ConfigurationError
from tests.config.pipelines import resolve, two_stage_pipeline


@pytest.mark.invariant("CONFIG-INV-100")
@pytest.mark.parametrize(
    "flags",
    [
        [("stage-1.max-num-seqs", "4")],
        [("stage_1.max_num_seqs", "4")],
        [("stage-1", '{"max_num_seqs": 4}')],
        [("stage-overrides", '{"1": {"max_num_seqs": 4}}')],
        [("max-num-seqs", "4"), ("stage-0.max-num-seqs", "16")],
    ],
)
def test_spellings_of_one_override(flags: list[tuple[str, str]]) -> None:
    config = resolve(two_stage_pipeline(), flags=flags)
    assert [stage.max_num_seqs for stage in config.stages] == [16, 4]


def test_text_is_parsed_as_the_key_expects() -> None:
    config = resolve(
        accelerators=("cuda:0", "cuda:1"),
        flags=[
            ("enforce-eager", "true"),
            ("init-timeout", "1.5"),
            ("memory-budget-gib", "8"),
            ("devices", '["cuda:0", "1"]'),
            ("tensor-parallel-size", "2"),
            ("served-model-name", "8"),
            ("restart.max-restarts", "0"),
            ("operation-limits", '{"step": 3}'),
            ("limits.max-inflight-requests", "8"),
            ("options.depth", "3"),
            ("options.name", "three"),
            ("stage-0.options.flag", "true"),
            ("default-sampling-params", '{"height": 64}'),
        ],
    )
    (stage,) = config.stages
    assert stage.enforce_eager is True
    assert stage.init_timeout_s == 1.5
    assert stage.memory_budget_gib == 8.0
    assert stage.devices == ("cuda:0", "cuda:1")
    assert config.served_model_name == "8"
    assert stage.restart.max_restarts == 0
    assert stage.operation_limits_s["step"] == 3.0
    assert config.limits.max_inflight_requests == 8
    assert stage.options == {"depth": 3, "name": "three", "flag": True}
    assert stage.default_sampling_params == {"height": 64}


def test_null_means_unset_again() -> None:
    yaml = "memory_budget_gib: 4"
    assert resolve(yaml=yaml).stages[0].memory_budget_gib == 4.0
    flags = [("memory-budget-gib", "null")]
    assert resolve(yaml=yaml, flags=flags).stages[0].memory_budget_gib is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("fp8", "fp8"),
        ("none", "none"),
        ("null", None),
        ('{"transformer": "fp8", "vae": null}', {"transformer": "fp8", "vae": None}),
    ],
)
def test_precision_as_a_word_or_as_json(text: str, value: object) -> None:
    for flag in ("quantization-config", "quantization", "stage-0.quantization"):
        config = resolve(flags=[(flag, text)])
        assert config.stages[0].quantization_config == value


@pytest.mark.invariant("CONFIG-INV-002")
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (("max-num-seqs", "four"), "max_num_seqs is 'four'; expected int, got str"),
        (("enforce-eager", "maybe"), "enforce_eager is 'maybe'; expected bool, got str"),
        (("quantization", '{"transformer":'), "quantization_config is not valid JSON"),
        (("stage-0", "{"), "stage_0 is not valid JSON: '{'"),
        (("stage-0", '{"max_num_seqs": "4"}'), "stage 0.max_num_seqs is '4'; expected int"),
        (("options", "[1]"), r"options is \[1\]; expected object, got array"),
        (("limits", '{"a": 1}'), "unknown key limits.a"),
    ],
)
def test_wrong_text(flag: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Overrides.from_flags([flag])


def test_which_flags_are_overrides() -> None:
    assert is_override_flag("stage-0")
    assert is_override_flag("stage-12.process")
    assert is_override_flag("limits.stream-buffer")
    assert is_override_flag("operation-limits.step")
    assert not is_override_flag("stage-overrides")
    assert not is_override_flag("host")
    assert not is_override_flag("nothing.here")
