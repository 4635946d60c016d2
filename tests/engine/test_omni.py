"""`Omni`: the engine without asyncio."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from omnistage.contracts.errors import InvalidRequestError, UnavailableError
from omnistage.contracts.outputs import FinishReason
from omnistage.engine.omni import Omni
from tests.toy.deployment import counting, expected, toy_config
from tests.toy.leaks import nothing_left


@pytest.fixture
def omni() -> Iterator[Omni]:
    with nothing_left():
        limits = {"max_inflight_requests": 4}
        with Omni(config=toy_config(ranks=1, process="inline", limits=limits)) as omni:
            yield omni


def first_value(result: Any) -> float:
    return float(result.tensors["x"][0])


def test_results_come_in_order_and_one_failure_stays_alone(omni: Omni) -> None:
    bad = counting(1, fault={"kind": "invalid", "at": 0, "stage": 0})
    prompts = [counting(1, start=i) for i in range(10)]
    prompts[3] = bad
    results = omni.generate(prompts, use_tqdm=False)
    for i, result in enumerate(results):
        if i == 3:
            assert result.error_status_code == 400
            assert result.finish_reason is FinishReason.ERROR
        else:
            assert [first_value(result)] == expected(1, start=i)


@pytest.mark.invariant("ORCH-INV-300")
def test_several_threads_share_the_places_of_one_engine(omni: Omni) -> None:
    """Together they ask for more than the engine admits: nobody is refused."""

    def work(start: int) -> list[float]:
        prompts = [counting(1, start=start + i) for i in range(10)]
        results = omni.generate(prompts, use_tqdm=False)
        assert not [result.error for result in results if result.error]
        return [first_value(result) for result in results]

    with ThreadPoolExecutor(4) as pool:
        for i, numbers in enumerate(pool.map(work, range(0, 400, 100))):
            assert numbers == expected(10, start=100 * i)


def test_a_stream_may_be_left_early(omni: Omni) -> None:
    events = omni.stream(counting(10_000))
    assert next(events).request_id
    events.close()
    give_up = time.monotonic() + 10
    while omni._engine.num_requests:
        assert time.monotonic() < give_up, "the abort of a stream that was left"
        time.sleep(0.005)


@pytest.mark.invariant("ORCH-INV-300")
def test_closing_ends_the_calls_of_other_threads() -> None:
    with nothing_left():
        omni = Omni(config=toy_config(ranks=1, process="inline"))
        results: list[Any] = []
        prompt = counting(100_000, delay_s=0.001)
        worker = threading.Thread(
            target=lambda: results.extend(omni.generate(prompts=[prompt] * 3, use_tqdm=False))
        )
        worker.start()
        while omni._engine.num_requests < 3:
            time.sleep(0.001)
        closers = [threading.Thread(target=omni.close) for _ in range(3)]
        for closer in closers:
            closer.start()
        for thread in (worker, *closers):
            thread.join(20)
            assert not thread.is_alive()
        assert [result.error_type for result in results] == ["unavailable"] * 3


@pytest.mark.invariant("ORCH-INV-300")
def test_after_close_a_call_says_so() -> None:
    omni = Omni(config=toy_config(ranks=1, process="inline"))
    events = omni.stream(counting(100))
    next(events)
    omni.close()
    omni.close()
    for call in (lambda: omni.generate([counting(1)]), lambda: omni.abort("x")):
        with pytest.raises(UnavailableError, match="closed"):
            call()
    with pytest.raises(UnavailableError):
        next(events)


def test_a_start_that_fails_leaves_nothing() -> None:
    with nothing_left(), pytest.raises(InvalidRequestError, match="no such file"):
        Omni(config=toy_config(ranks=1, options={"load_error": "no such file"}))


SCRIPT = """
import sys
from omnistage.engine.omni import Omni
from tests.toy.deployment import counting, toy_config
omni = Omni(config=toy_config(ranks={ranks}, process={process!r}))
print(omni.generate([counting(1)], use_tqdm=False)[0].tensors["x"][0], flush=True)
{end}
"""


@pytest.mark.parametrize("process", [None, "inline"])
def test_a_script_needs_neither_guard_nor_close(process: str | None) -> None:
    with nothing_left():
        script = SCRIPT.format(ranks=1, process=process, end="")
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-c", script], capture_output=True, timeout=60, text=True
        )
        assert (done.returncode, done.stdout) == (0, f"{expected(1)[0]}\n")
        assert "Traceback" not in done.stderr
        assert "destroyed" not in done.stderr


@pytest.mark.invariant("ORCH-INV-300")
def test_ctrl_c_ends_a_script_in_order() -> None:
    end = "omni.generate([counting(10**4, delay_s=0.001)], use_tqdm=False)"
    with nothing_left():
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(ranks=2, process=None, end=end)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == f"{expected(1)[0]}\n"
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
