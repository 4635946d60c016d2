"""From a prompt to a request, from payloads to results: the parts without a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from omnistage.contracts.errors import InvalidRequestError, RequestCancelledError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import FinishReason, OmniRequestOutput
from omnistage.contracts.payloads import InlineFrame, PayloadRef, SharedSegment, TensorRef
from omnistage.contracts.sampling import GenericParams, OmniTokenSamplingParams
from omnistage.contracts.tensors import host_tensor
from omnistage.engine.admission import make_children, make_request, needed_stages
from omnistage.engine.health import engine_health
from omnistage.engine.joins import join_payloads
from omnistage.engine.prompts import prompt_data
from omnistage.engine.results import ResultCollector, materialize
from omnistage.stages.pool import ReplicaState, StagePool
from tests.toy.deployment import toy_config, toy_pipeline

PICTURE = np.zeros((4, 6, 3), np.uint8)


def test_a_prompts_pictures_become_pixels() -> None:
    media = {"image": [Image.new("P", (6, 4)), PICTURE], "mask": Image.new("RGB", (6, 4))}
    data = prompt_data({"prompt": "a", "multi_modal_data": media})
    assert data.modality is Modality.IMAGE
    assert data.fields == {"prompt": "a"}
    shapes = {name: value.shape for name, value in data.tensors.items()}
    assert shapes == {"image_0": (4, 6, 3), "image_1": (4, 6, 3), "mask_0": (4, 6, 1)}
    assert prompt_data("b").modality is Modality.TEXT


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        (7, "prompt"),
        ({"promt": "a"}, "did you mean 'prompt'"),
        ({"prompt": 3}, "string"),
        ({"prompt": "a", "multi_modal_data": {"sound": 1}}, "image, mask"),
        ({"prompt": "a", "multi_modal_data": {"image": "cat.png"}}, "PIL image"),
        ({"prompt": "a", "multi_modal_data": {"image": PICTURE.astype(float)}}, "uint8"),
    ],
)
def test_a_prompt_that_cannot_be_names_the_fault(prompt: object, names: str) -> None:
    with pytest.raises(InvalidRequestError, match=names):
        prompt_data(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_a_time_limit_is_positive_and_finite(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        make_request(toy_config(ranks=1), "a", None, timeout_s=timeout_s)


def test_parameters_fit_their_stages() -> None:
    config = toy_config(ranks=1)
    with pytest.raises(InvalidRequestError, match="GenericParams"):
        make_request(config, "a", OmniTokenSamplingParams())
    with pytest.raises(InvalidRequestError, match="1 entries, the model 2"):
        make_request(config, "a", None, sampling_params_list=[GenericParams()])
    with pytest.raises(InvalidRequestError, match="not both"):
        make_request(config, "a", GenericParams(), sampling_params_list=[GenericParams()] * 2)
    with pytest.raises(InvalidRequestError, match="at least 1"):
        make_request(config, "a", None, num_children=0)


@pytest.mark.invariant("ORCH-INV-102")
def test_children_come_in_groups_with_their_companions() -> None:
    config = toy_config(ranks=1, pipeline=toy_pipeline(join=True))
    children = make_children(config.pipeline, make_request(config, "a", None, num_children=2))
    assert [c.identity.child_index for c in children.values()] == [0, 1, 2, 3]
    assert [c.identity.role for c in children.values()] == ["main", "negative"] * 2
    assert [c.group for c in children.values()] == [0, 0, 1, 1]
    assert children[3].prefer == children[2].key


def test_only_what_a_wanted_output_needs_is_needed() -> None:
    pipeline = toy_pipeline(both_final=True)
    assert needed_stages(pipeline, None) == {0, 1}
    assert needed_stages(pipeline, frozenset({Modality.HIDDEN})) == {0}
    assert needed_stages(pipeline, frozenset({Modality.AUDIO})) == {0, 1}


@pytest.mark.invariant("ORCH-INV-103")
def test_joined_payloads_keep_every_frame_at_its_tensor() -> None:
    def part(name: str, place: InlineFrame | SharedSegment) -> PayloadRef:
        tensors = {"x": TensorRef("uint8", (1,), place)}
        return PayloadRef(
            modality=Modality.HIDDEN, fields={"of": name}, tensors=tensors, nbytes=1, handle=name
        )

    segment = SharedSegment(1, 2, "t", 0)
    joined, frames = join_payloads(
        {
            "negative": (part("n", InlineFrame(0)), (b"n",)),
            "main": (part("m", InlineFrame(0)), (b"m",)),
            "shared": (part("s", segment), ()),
        }
    )
    assert frames == (b"n", b"m")
    assert joined.fields == {"of": "m", "negative.of": "n", "shared.of": "s"}
    assert joined.tensors["x"].place == InlineFrame(1)
    assert joined.tensors["negative.x"].place == InlineFrame(0)
    assert joined.tensors["shared.x"].place == segment
    assert (joined.nbytes, joined.handle) == (3, None)


def test_events_become_pictures_arrays_and_text() -> None:
    event = OmniRequestOutput(
        request_id="r",
        modality=Modality.IMAGE,
        tensors={"images": host_tensor(PICTURE[None]), "latents": host_tensor(np.ones(3))},
        fields={"text": "hello"},
    )
    result = materialize(event)
    assert [picture.size for picture in result.images] == [(6, 4)]
    assert result.tensors["latents"].flags.writeable
    assert result.text == "hello"


def test_results_are_gathered_by_child_and_output() -> None:
    collector = ResultCollector("r", "prompt")
    places = [(1, 0), (0, 1), (0, 0)]
    for child, output in places:
        collector.add(
            OmniRequestOutput(
                request_id="r",
                child_index=child,
                output_index=output,
                images=[f"{child}{output}"],  # type: ignore[list-item]
                finish_reason=FinishReason.STOP,
            )
        )
    collector.add(OmniRequestOutput(request_id="r", partial=True, images=["no"]))  # type: ignore[list-item]
    assert collector.result().images == ["00", "01", "10"]
    cancelled = ResultCollector("r", "p").fail(RequestCancelledError("over"))
    assert cancelled.finish_reason is FinishReason.ABORT


@pytest.mark.invariant("STAGE-INV-203")
def test_health_tells_the_truth_of_every_state() -> None:
    pools = tuple(StagePool(stage, "random") for stage in toy_config(ranks=1, replicas=2).stages)
    replicas = [replica for pool in pools for replica in pool.replicas]

    def health(draining: bool = False, started: bool = True):
        return engine_health(pools, started=started, draining=draining)

    assert not health().live
    for replica in replicas:
        replica.state = ReplicaState.READY
        replica.heard(None)
    assert health().ready
    assert not health(draining=True).ready
    assert not health(started=False).ready
    replicas[0].state, replicas[0].note = ReplicaState.RESTARTING, "killed"
    assert health().ready, "its sibling serves"
    replicas[1].status_at -= 1000.0
    state = health()
    assert not state.live
    assert "killed" in (state.reason or "")
    assert "no sign of life" in (state.reason or "")
    assert [stage["name"] for stage in state.stages] == ["count", "scale"]


def test_identities_are_printed_with_their_child() -> None:
    identity = RequestIdentity(request_id="r")
    assert [str(identity), str(identity.child(2))] == ["r", "r#2"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("request_id", 5), ("priority", "high"), ("timeout_s", "1"), ("num_children", True)],
)
def test_arguments_of_a_wrong_type_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match="must be of type"):
        make_request(toy_config(ranks=1), "a prompt", None, **{name: value})  # type: ignore[arg-type]
