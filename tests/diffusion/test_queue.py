"""Requests that wait: order, defaults, and who has been overtaken how often."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.contracts.errors import OverloadedError
from omnistage.contracts.identity import RequestIdentity
from omnistage.diffusion.batching import shape_key
from omnistage.diffusion.queue import SEED_BITS, WaitingQueue
from tests.diffusion.driver import diffusion_request


def make_queue(capacity: int = 100, **defaults) -> WaitingQueue:
    ticks = count()
    return WaitingQueue(
        capacity=capacity,
        defaults=defaults,
        batch_key=shape_key,
        clock=lambda: float(next(ticks)),
    )


def request(name: str, **changes):
    return diffusion_request(request_id=name, **changes)


def names(entries) -> list[str]:
    return [one.identity.request_id for one in entries]


@pytest.mark.invariant("DIFF-RUNTIME-INV-041")
@settings(deadline=None)
@given(
    priorities=st.lists(st.integers(-1, 1), min_size=1, max_size=8),
    takes=st.lists(st.sets(st.integers(0, 7)), max_size=5),
)
def test_overtaken_counts_those_who_stood_behind_and_went_before(priorities, takes):
    queue = make_queue()
    for number, priority in enumerate(priorities):
        queue.add(request(str(number), priority=priority))
    in_order = sorted(range(len(priorities)), key=lambda n: (-priorities[n], n))
    assert names(queue.ready()) == [str(n) for n in in_order]
    overtaken = Counter()
    for wanted in takes:
        ready = queue.ready()
        chosen = [one for one in ready if int(one.identity.request_id) in wanted]
        for place, one in enumerate(ready):
            if one not in chosen:
                overtaken[one.key] += sum(other in chosen for other in ready[place + 1 :])
        assert queue.take(chosen) == chosen
        assert {one.key: one.overtaken for one in queue.ready()} == {
            one.key: overtaken[one.key] for one in queue.ready()
        }


def test_who_is_not_ready_is_neither_shown_nor_overtaken():
    queue = make_queue()
    queue.add(request("open", input_complete=False))
    queue.add(request("poor"))
    queue.set_credits(("poor", 0), 0)
    queue.add(request("a"))
    assert names(queue.ready()) == ["a"]
    queue.take(queue.ready())
    queue.end_input(RequestIdentity(request_id="open"), 0)
    queue.set_credits(("poor", 0), 1)
    assert [(one.identity.request_id, one.overtaken) for one in queue.ready()] == [
        ("open", 0),
        ("poor", 0),
    ]


def test_each_notes_when_it_came():
    queue = make_queue()
    for name in "ab":
        queue.add(request(name))
    assert [one.arrived_s for one in queue.ready()] == [0.0, 1.0]


def test_the_callers_parameters_win_over_the_stages():
    queue = make_queue(height=64, num_inference_steps=9)
    queue.add(request("a", height=32, seed=0))
    (entry,) = queue.ready()
    assert (entry.params.height, entry.params.num_inference_steps) == (32, 9)
    assert entry.params.seed == 0, "nought is a seed"


def test_seeds_are_drawn_where_none_is_given_and_differ():
    queue = make_queue()
    for number in range(20):
        queue.add(request(str(number)))
    seeds = {one.params.seed for one in queue.ready()}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)


@pytest.mark.invariant("DIFF-RUNTIME-INV-018")
def test_a_place_that_becomes_free_is_given_again():
    queue = make_queue(capacity=1)
    queue.add(request("a"))
    with pytest.raises(OverloadedError, match="max_queued_requests"):
        queue.add(request("b"))
    queue.remove(("a", 0))
    queue.remove(("a", 0))
    queue.add(request("b"))
    assert len(queue) == 1
    assert ("b", 0) in queue
