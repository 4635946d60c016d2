"""What callers get back."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import OverloadedError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import FinishReason, OmniRequestOutput
from omnistage.contracts.payloads import StageData


@pytest.mark.invariant("IO-INV-002")
def test_stage_data_says_its_modality() -> None:
    with pytest.raises(TypeError, match="modality"):
        StageData()  # type: ignore[call-arg]


@pytest.mark.invariant("IO-INV-002")
def test_the_modalities_are_stable() -> None:
    assert [modality.value for modality in Modality] == [
        "text",
        "image",
        "audio",
        "video",
        "action",
        "tokens",
        "hidden",
        "latent",
    ]


@pytest.mark.invariant("IO-INV-101")
def test_an_event_is_not_terminal_unless_it_says_so() -> None:
    event = OmniRequestOutput(request_id="r")
    assert not event.finished
    assert not event.partial
    assert event.finish_reason is None
    assert {reason.value for reason in FinishReason} == {"stop", "length", "abort", "error"}


def test_an_error_shows_its_status_and_type() -> None:
    event = OmniRequestOutput(request_id="r", error=OverloadedError("full"))
    assert (event.error_status_code, event.error_type) == (429, "overloaded")
    assert OmniRequestOutput(request_id="r").error_status_code is None
    assert OmniRequestOutput(request_id="r").error_type is None


def test_events_share_no_mutable_state() -> None:
    first, second = OmniRequestOutput(request_id="a"), OmniRequestOutput(request_id="b")
    first.fields["x"] = 1
    assert second.fields == {}
