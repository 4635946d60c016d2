"""Hypothesis strategies for message structs, derived from their types."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

plain_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
plain_values = st.recursive(
    plain_scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


def values_of(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of one field type."""
    match kind:
        case mi.AnyType():
            return plain_values
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType(ge=least, le=most):
            low, high = -(2**40), 2**40
            return st.integers(low if least is None else least, high if most is None else most)
        case mi.FloatType():
            return st.floats(allow_nan=False)
        case mi.StrType():
            return st.text(max_size=8)
        case mi.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case mi.UnionType(types=types):
            return st.one_of([values_of(option) for option in types])
        case mi.ListType(item_type=item):
            return st.lists(values_of(item), max_size=2)
        case mi.VarTupleType(item_type=item):
            return st.lists(values_of(item), max_size=2).map(tuple)
        case mi.DictType(key_type=key, value_type=value):
            return st.dictionaries(values_of(key), values_of(value), max_size=2)
        case mi.StructType(cls=cls):
            return structs(cls)
    raise TypeError(f"no strategy for {kind}")


def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Instances of a struct with every field drawn."""
    info = mi.type_info(cls)
    assert isinstance(info, mi.StructType)
    fields = {field.name: values_of(field.type) for field in info.fields}
    return st.builds(cls, **fields)
