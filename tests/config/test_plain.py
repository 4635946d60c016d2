"""The way of a configuration to another process and back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.config.plain import from_plain, to_plain
from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.contracts.errors import ProtocolError
from tests.config.pipelines import resolve, two_stage_pipeline

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5)
scalars |= st.floats(allow_nan=False)
plain_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def over_the_wire(plain: dict[str, Any]) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plain))


@pytest.mark.invariant("CONFIG-INV-105")
@given(options=st.dictionaries(st.text(max_size=5), plain_values, max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_round_trip_changes_nothing(options: dict[str, Any]) -> None:
    config = resolve(
        two_stage_pipeline(default_sampling_params={0: {"max_tokens": 3}}),
        options=options,
        memory_budget_gib=1.5,
        num_replicas=2,
    )
    assert from_plain(OmniConfig, over_the_wire(to_plain(config))) == config
    for stage in config.stages:
        assert from_plain(ResolvedStage, over_the_wire(to_plain(stage))) == stage


@pytest.mark.invariant("CONFIG-INV-105")
def test_the_plain_form_holds_plain_values_only() -> None:
    def kinds(value: Any) -> set[type]:
        if isinstance(value, dict):
            return {dict}.union(*[kinds(v) | kinds(k) for k, v in value.items()])
        if isinstance(value, list):
            return {list}.union(*[kinds(item) for item in value])
        return {type(value)}

    assert kinds(to_plain(resolve(two_stage_pipeline()))) <= {
        dict,
        list,
        str,
        int,
        float,
        bool,
        type(None),
    }


@pytest.mark.invariant("CONFIG-INV-105")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "do not belong: .*extra"),
        ({"process": 3}, "Expected `str`, got `int`"),
        ({"restart": {"max_restarts": 1, "other": 2}}, "do not belong: .*restart.other"),
        ({"stage": None}, "malformed"),
    ],
)
def test_what_does_not_belong_is_refused(change: dict[str, Any], message: str) -> None:
    plain = to_plain(resolve().stages[0])
    with pytest.raises(ProtocolError, match=message):
        from_plain(ResolvedStage, plain | change)


@pytest.mark.invariant("CONFIG-INV-105")
def test_a_missing_entry_is_refused() -> None:
    plain = to_plain(resolve().stages[0])
    del plain["stage"]
    with pytest.raises(ProtocolError, match="missing required field `stage`"):
        from_plain(ResolvedStage, plain)
