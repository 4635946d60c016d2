"""Several requests in one command: packing, and who may share."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.contracts.errors import InternalError, InvalidRequestError, OmniError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.diffusion.batching import call_key, pack, shape_key, unpack
from tests.diffusion.driver import diffusion_request

NAMES = st.text("abc._0", min_size=1, max_size=4)
PARTS = st.builds(
    StageData,
    modality=st.sampled_from([Modality.TEXT, Modality.IMAGE, Modality.LATENT]),
    fields=st.dictionaries(
        st.text(max_size=4), st.none() | st.integers(0, 9) | st.text(max_size=3)
    ),
    tensors=st.dictionaries(NAMES, st.integers(0, 5).map(lambda n: np.full(n, n, np.float32))),
)
ERRORS = st.builds(InvalidRequestError, st.text(max_size=5), param=st.none() | st.just("height"))


def key(name: str, function, **changes):
    one = diffusion_request(request_id=name, **changes)
    return function(one.params, one.data)


def as_plain(part: StageData | OmniError):
    if isinstance(part, OmniError):
        return type(part), part.message, part.param
    tensors = {name: value.tolist() for name, value in part.tensors.items()}
    return part.modality, part.fields, tensors


@settings(deadline=None)
@given(parts=st.lists(PARTS | ERRORS, max_size=12))
def test_unpack_gives_what_pack_was_given(parts):
    """Over the wire too, where tensors go beside."""
    packed = pack(parts)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(packed.fields))
    arrived = StageData(modality=packed.modality, fields=fields, tensors=packed.tensors)
    assert [as_plain(part) for part in unpack(arrived)] == [as_plain(part) for part in parts]


def test_an_error_keeps_its_kind_and_detail():
    (error,) = unpack(pack([InternalError("no", detail="the log's")]))
    assert type(error) is InternalError
    assert (error.message, error.detail) == ("no", "the log's")


ARRAY = np.zeros((1, 2, 3), np.float32)
PICTURE = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.invariant("DIFF-RUNTIME-INV-052")
@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"prompt": "another"}, True),
        ({"seed": 8}, True),
        ({"negative_prompt": "bad"}, False),
        ({"height": 64}, False),
        ({"num_inference_steps": 9}, False),
        ({"guidance_scale": 2.0}, False),
        ({"num_outputs_per_prompt": 2}, False),
        ({"output_type": "np"}, False),
        ({"scheduler": "Other"}, False),
        ({"extra_args": {"clip_skip": 1}}, False),
        ({"latents": ARRAY}, False),
        ({"images": (PICTURE,)}, False),
        ({"generator_device": "cuda"}, False),
    ],
)
def test_one_call_serves_what_differs_in_prompt_and_seed_only(changes, shared):
    one = key("a", call_key, seed=7)
    assert (key("b", call_key, **{"seed": 7, **changes}) == one) == shared


def test_texts_of_the_negative_prompt_may_differ():
    first, second = (key("a", call_key, negative_prompt=text) for text in ("bad", "ugly"))
    assert first == second


@pytest.mark.parametrize("changes", [{"latents": ARRAY}, {"images": (PICTURE,)}])
def test_who_shares_with_nobody_does_not_share_with_its_like(changes):
    assert key("a", call_key, **changes) != key("a", call_key, **changes)


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"prompt": "x", "seed": 3, "num_inference_steps": 2, "guidance_scale": 2.0}, True),
        ({"negative_prompt": "bad"}, True),
        ({"width": 64}, False),
        ({"num_outputs_per_prompt": 2}, True),
        ({"images": (PICTURE,)}, False),
    ],
)
def test_steps_are_shared_by_what_has_one_shape(changes, shared):
    one = key("a", shape_key, height=32, width=32)
    assert (key("b", shape_key, **{"height": 32, "width": 32, **changes}) == one) == shared
