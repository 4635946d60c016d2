"""How the work of one call is shared out."""

from __future__ import annotations

import pytest
import torch

from omnistage.attention.joint_op import runs_of
from omnistage.attention.joint_streams import Job, run_jobs, split_by_cost


def costs(jobs: list[Job]) -> list[int]:
    return [job.cost for job in jobs]


@pytest.mark.parametrize(
    ("given", "here", "there"),
    [([5], [5], []), ([1, 5], [5], [1]), ([3, 9, 4, 2, 1], [9, 1], [4, 3, 2]), ([2, 2], [2], [2])],
)
def test_two_shares_cost_about_the_same(
    given: list[int], here: list[int], there: list[int]
) -> None:
    shares = split_by_cost([Job(cost, lambda: None) for cost in given])
    assert [costs(share) for share in shares] == [here, there]


def test_every_job_runs_once() -> None:
    done: list[int] = []
    jobs = [Job(1, lambda number=number: done.append(number)) for number in range(4)]
    run_jobs(jobs, torch.device("cpu"))
    assert done == [0, 1, 2, 3]


def test_adjacent_samples_of_one_length_are_one_call() -> None:
    found = [
        (run.samples.start, run.samples.stop, run.text_tokens) for run in runs_of([4, 4, 2, 4])
    ]
    assert found == [(0, 2, 4), (2, 3, 2), (3, 4, 4)]
