"""What the configuration refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest

from omnistage.config.deploy import parse_deploy
from omnistage.config.overrides import Overrides
from omnistage.config.schema import LIMIT_KEYS, RESTART_KEYS, STAGE_KEYS, WEEK_S, Key, Seconds
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from tests.config.pipelines import resolve, two_stage_pipeline


@pytest.mark.invariant("CONFIG-INV-001")
@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("max_num_seq: 1", "unknown key max_num_seq; did you mean 'max_num_seqs'?"),
        (
            "stages: [{stage_id: 0}, {stage_id: 1, num_replica: 2}]",
            "unknown key stages[1].num_replica; did you mean 'num_replicas'?",
        ),
        (
            "limits: {max_inflight: 2}",
            "unknown key limits.max_inflight; did you mean 'max_inflight_requests'?",
        ),
        (
            "operation_limits: {steps: 2}",
            "unknown key operation_limits.steps; did you mean 'step'?",
        ),
        (
            "operation_limits: {load: 2}",
            "unknown key operation_limits.load; allowed: compile, forward, step, encode, decode",
        ),
        (
            "stages: [{stage_id: 0, restart: {back_off: 2}}]",
            "unknown key stages[0].restart.back_off; did you mean 'backoff_s'?",
        ),
        ("connectors: {}", "unknown key connectors; did you mean 'connector'?"),
        (
            "restart: {zzz: 1}",
            "unknown key restart.zzz; allowed: max_restarts, window_s, backoff_s, max_backoff_s",
        ),
        ("1: 2", "unknown key 1; allowed: "),
    ],
)
def test_unknown_keys_name_the_path_and_the_nearest_key(yaml: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_deploy(yaml)
    assert caught.value.message.startswith(message)


@pytest.mark.invariant("CONFIG-INV-001")
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_num_sequences": 1}, "unknown key max_num_sequences; did you mean 'max_num_seqs'?"),
        (
            {"stage_overrides": {0: {"dtyp": "auto"}}},
            "unknown key stage_overrides.0.dtyp; did you mean 'dtype'?",
        ),
        ({"stage_overrides": {"one": {}}}, "stage_overrides has key 'one'; keys are stage ids"),
    ],
)
def test_unknown_overrides(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Overrides.from_kwargs(**kwargs)
    assert caught.value.message == message


@pytest.mark.invariant("CONFIG-INV-002")
@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("max_num_seqs: '4'", "max_num_seqs is '4'; expected int, got str"),
        ("max_num_seqs: true", "max_num_seqs is True; expected int, got bool"),
        ("max_num_seqs: 0", "max_num_seqs is 0; expected int >= 1"),
        ("shm_threshold_bytes: -1", "shm_threshold_bytes is -1; expected int >= 0"),
        (
            "stages: [{stage_id: 0, num_replicas: 1.5}]",
            "stages[0].num_replicas is 1.5; expected int, got float",
        ),
        ("init_timeout: 0", "init_timeout is 0; expected float > 0.0"),
        ("init_timeout: .inf", "init_timeout is inf; expected float <= 604800.0"),
        ("init_timeout: .nan", "init_timeout is nan; expected float"),
        (
            "lb_policy: round_robin",
            "lb_policy is 'round_robin'; allowed: least-queue-length, round-robin, random; "
            "did you mean 'round-robin'?",
        ),
        (
            "device: gpu",
            "device is 'gpu'; allowed: auto, cpu, cuda; did you mean 'cuda'?",
        ),
        (
            "dtype: fp16",
            "dtype is 'fp16'; allowed: auto, float32, bfloat16, float16; did you mean 'float16'?",
        ),
        ("dtype: 7", "dtype is 7; allowed: auto, float32, bfloat16, float16"),
        ("process: a/b", "process is 'a/b'; expected str matching regex"),
        ("limits: [1]", "limits must be a mapping of keys to values, got [1]"),
        ("restart: {backoff_s: x}", "restart.backoff_s is 'x'; expected float, got str"),
        ("stages: {0: {}}", "stages must be a list of stages, got {0: {}}"),
        ("stages: [{max_num_seqs: 1}]", "stages[0].stage_id is None; every stage needs its number"),
        ("stages: [{stage_id: -1}]", "stages[0].stage_id is -1"),
        ("stages: [{stage_id: true}]", "stages[0].stage_id is True"),
        ("stages: [3]", "stages[0] must be a mapping of keys to values, got 3"),
        ("- 1", "the file must be a mapping of keys to values, got [1]"),
        ("options: {when: 2020-01-01}", "options.when is a date; allowed are mappings"),
        ("schema_version: 2", "schema_version is 2; this release reads version 1"),
    ],
)
def test_wrong_values_name_the_value_and_what_is_allowed(yaml: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_deploy(yaml)
    assert caught.value.message.startswith(message)


@pytest.mark.invariant("CONFIG-INV-003")
@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("dtype: auto\ndtype: float32", "key 'dtype' is given twice (line 2, column 1)"),
        ("restart: {window_s: 1, window_s: 2}", "key 'window_s' is given twice"),
        ("stages: [{stage_id: 0}, {stage_id: 0}]", "stage_id 0 is given twice, again at stages[1]"),
        ("init_timeout: 1\ninit_timeout_s: 2", "init_timeout is given twice"),
        (
            "default_sampling_params: {0: {height: 8}}\n"
            "stages: [{stage_id: 0, default_sampling_params: {height: 9}}]",
            "default_sampling_params.0 is given twice",
        ),
        (
            "default_sampling_params: {0: {}, height: 8}",
            "default_sampling_params mixes stage ids and parameter names",
        ),
    ],
)
def test_nothing_is_given_twice_in_a_file(yaml: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_deploy(yaml)
    assert message in caught.value.message


@pytest.mark.invariant("CONFIG-INV-003")
@pytest.mark.parametrize(
    "flags",
    [
        [("max-num-seqs", "1"), ("max_num_seqs", "2")],
        [("stage-0.dtype", "auto"), ("stage-0.dtype", "auto")],
        [("stage-0.dtype", "auto"), ("stage-overrides", '{"0": {"dtype": "auto"}}')],
        [("stage-0", '{"dtype": "auto"}'), ("stage-0.dtype", "auto")],
        [("stage-0", '{"dtype": "auto", "dtype": "auto"}')],
        [("max-inflight-requests", "1"), ("limits.max-inflight-requests", "2")],
        [("usp", "1"), ("sequence-parallel-size", "2")],
    ],
)
def test_nothing_is_given_twice_on_a_command_line(flags: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigurationError, match=r"twice|already has one value"):
        Overrides.from_flags(flags)


@pytest.mark.invariant("CONFIG-INV-102")
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"process": "inline", "rank_parallel_size": 2}, "'inline' cannot have 2 ranks"),
        ({"process": "inline", "num_replicas": 2}, "'inline' cannot have 2 replicas"),
        ({"devices": ["cpu", "cpu"]}, r"devices lists 2 \(cpu, cpu\), but 1 rank"),
        (
            {"devices": "0,1,0", "tensor_parallel_size": 2, "num_replicas": 2},
            r"devices lists 3 .* need 2 \(shared\) or 4",
        ),
        ({"device": "cuda", "num_replicas": 3}, "need 3 GPUs, but this machine has cuda:0, cuda:1"),
        ({"restart": {"backoff_s": 5, "max_backoff_s": 1}}, "max_backoff_s is 1.0, less than"),
    ],
)
def test_impossible_combinations(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCombinationError, match=message):
        resolve(accelerators=("cuda:0", "cuda:1"), **kwargs)


@pytest.mark.invariant("CONFIG-INV-103")
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"device": "cuda"}, "device 'cuda' was asked for, but no GPU is usable on this machine"),
        ({"devices": ["cuda:3"]}, "device cuda:3 does not exist; no GPU is usable"),
        ({"devices": ["gpu0"]}, "'gpu0' is no device; allowed: cpu, cuda:N"),
    ],
)
def test_a_device_that_is_not_there(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(accelerators=(), **kwargs)


@pytest.mark.invariant("CONFIG-INV-102")
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"yaml": "stages: [{stage_id: 2}]"}, "names stage 2, but .* has stages 0 to 1"),
        ({"stage_overrides": {5: {}}}, "arguments names stage 5"),
        ({"yaml": "pipeline: other"}, "is for pipeline 'other', but the model is 'two_stages'"),
        ({"default_sampling_params": {"height": 8}}, "are given by stage id"),
        (
            {"default_sampling_params": {1: {"hight": 8}}},
            "stage 1: default_sampling_params.hight does not exist; did you mean 'height'",
        ),
        (
            {"default_sampling_params": {1: {"height": "x"}}},
            r"stage 1: default_sampling_params: Expected int \| null, got str",
        ),
        (
            {"default_sampling_params": {0: {"height": 8}}},
            "stage 0: default_sampling_params.height does not exist",
        ),
    ],
)
def test_what_does_not_fit_the_pipeline(layers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(two_stage_pipeline(), **layers)


def all_keys() -> dict[str, Key]:
    nested = [key.nested for key in STAGE_KEYS.values() if key.nested]
    found = STAGE_KEYS | LIMIT_KEYS | RESTART_KEYS
    for keys in nested:
        found |= keys
    return found


@pytest.mark.invariant("CONFIG-INV-104")
def test_every_wait_is_bounded() -> None:
    waits = {
        name: key
        for name, key in all_keys().items()
        if name.endswith(("_s", "timeout")) or "seconds" in key.meaning
    }
    waits.pop("operation_limits")
    assert {"init_timeout", "heartbeat_timeout", "request_timeout_s", "forward"} <= set(waits)
    assert all(key.type == Seconds for key in waits.values())
    with pytest.raises(ConfigurationError, match="expected float <="):
        resolve(init_timeout=WEEK_S + 1)
