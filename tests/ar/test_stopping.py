"""What ends a sequence, and which text may leave before that is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.ar.stopping import StopStrings
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import StructuredOutput
from tests.ar.driver import Driver, Heard, token_options
from tests.ar.fake_executor import EOS, FakeExecutor


def ids(text: str) -> list[int]:
    return [ord(one) - 32 for one in text]


def generate(text: str, *, lag: int = 0, end: bool = True, **params: Any) -> Heard:
    forced = {"a": [*ids(text), *([EOS] if end else []), *[3] * 8]}
    driver = Driver(executor=FakeExecutor(forced=forced, lag=lag))
    heard = driver.add("a", **{"max_tokens": 40, **params})
    driver.run()
    driver.assert_nothing_held()
    return heard


@pytest.mark.invariant("AR-INV-106")
@pytest.mark.parametrize("lag", [0, 1])
def test_the_end_of_sequence_ends_it_and_is_no_text(lag: int) -> None:
    heard = generate("HELLO", lag=lag)
    assert heard.text == "HELLO"
    assert heard.token_ids == [*ids("HELLO"), EOS]
    assert heard.finish_reason == "stop"
    assert heard.last["stop_reason"] is None
    assert heard.last["completion_tokens"] == 6


def test_ignore_eos_goes_on_to_the_length() -> None:
    heard = generate("HI", ignore_eos=True, max_tokens=5)
    assert heard.finish_reason == "length"
    assert heard.token_ids == [*ids("HI"), EOS, 3, 3]


def test_min_tokens_holds_every_ending_back() -> None:
    assert generate("ABAB", stop=["AB"], min_tokens=4).text == "AB"
    heard = generate("ABAB", stop_token_ids=ids("B"), min_tokens=3)
    assert heard.token_ids == ids("ABAB")
    assert heard.last["stop_reason"] == ids("B")[0]


@pytest.mark.parametrize("lag", [0, 1])
def test_stop_strings_over_several_tokens(lag: int) -> None:
    heard = generate("ONE._TWO._THREE", lag=lag, stop=["O._T", "NEVER"])
    assert heard.text == "ONE._TW"
    assert heard.finish_reason == "stop"
    assert heard.last["stop_reason"] == "O._T"
    assert heard.token_ids == ids("ONE._TWO._T")
    kept = generate("ONE._TWO._THREE", lag=lag, stop=["O._T"], include_stop_str_in_output=True)
    assert kept.text == "ONE._TWO._T"


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_none() -> None:
    heard = generate("A##B#", stop=["###"])
    texts = [one.data.fields["text"] for one in heard.emissions if one.data]
    assert texts == ["A", "##B", "#"]


def test_a_stop_id_is_text_only_when_asked_for() -> None:
    assert generate("AB!", stop_token_ids=ids("!")).text == "AB"
    heard = generate("AB!", stop_token_ids=ids("!"), include_stop_str_in_output=True)
    assert heard.text == "AB!"
    assert heard.last["stop_reason"] == ids("!")[0]


def test_a_stop_string_in_the_last_allowed_token_wins_over_the_length() -> None:
    heard = generate("XYZ", stop=["Z"], max_tokens=3)
    assert (heard.text, heard.finish_reason) == ("XY", "stop")


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab#", max_size=14),
    st.lists(st.text("ab#", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
def test_pieces_of_any_size_give_what_the_whole_text_gives(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    """The reference looks at the text character by character."""
    expected, met = text, None
    for last in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:last].endswith(stop)]
        if ended:
            met = max(ended, key=len)
            expected = text[:last] if include else text[: last - len(met)]
            break
    finder, out, at = StopStrings(stops, include), "", 0
    found = None
    while at < len(text) and found is None:
        size = data.draw(st.integers(1, 4))
        piece, found = finder.push(text[at : at + size])
        out += piece
        at += size
    out += finder.flush() if found is None else ""
    assert (out, found) == (expected, met)


@pytest.mark.invariant("AR-INV-112")
@pytest.mark.parametrize("lag", [0, 1])
def test_a_grammar_is_asked_before_every_token_and_ends_the_sequence(lag: int) -> None:
    """The fake grammar allows one id a step; with lag 1 the step waits for the token before."""
    driver = Driver(executor=FakeExecutor(lag=lag))
    free = driver.add("free", max_tokens=12)
    heard = driver.add("a", structured=StructuredOutput(regex="4"), max_tokens=30)
    driver.run()
    assert heard.token_ids == [3, 4, 5, 6, EOS]
    assert heard.finish_reason == "stop"
    assert free.finish_reason == "length"
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-112")
def test_a_grammar_survives_preemption() -> None:
    driver = Driver(executor=FakeExecutor(num_blocks=9))
    driver.add("first", [1] * 8, max_tokens=20)
    heard = driver.add("a", [2] * 8, structured=StructuredOutput(regex="14"), max_tokens=20)
    driver.run()
    assert driver.scheduler.stats()["preemptions"] > 0
    assert heard.token_ids == [*range(3, 17), EOS]


def test_a_grammar_that_fails_fails_its_child_only() -> None:
    class Broken:
        def __init__(self, compiled: Any) -> None:
            self.asked = 0

        def bitmask(self) -> None:
            self.asked += 1
            if self.asked > 2:
                raise InvalidRequestError("the grammar is too complex here")

        def accept(self, token: int) -> None:
            pass

        def is_terminated(self) -> bool:
            return False

    driver = Driver(make_grammar=Broken)
    heard = driver.add("a", structured=StructuredOutput(regex="4"))
    other = driver.add("b", max_tokens=6)
    driver.run()
    assert heard.error is not None
    assert "too complex" in heard.error.message
    assert other.finish_reason == "length"
    driver.assert_nothing_held()


def test_a_stage_without_a_tokenizer_has_ids_only() -> None:
    driver = Driver(token_options(), FakeExecutor(tokenizer=None))
    heard = driver.add("a", max_tokens=2, logprobs=1)
    driver.run()
    assert heard.text == ""
    assert heard.last["logprobs"][0]["bytes"] == []
    data = heard.emissions[0].data
    assert data is not None
    assert data.modality == "tokens"
    with pytest.raises(InvalidRequestError, match="stop needs text"):
        driver.add("b", stop=["x"])
