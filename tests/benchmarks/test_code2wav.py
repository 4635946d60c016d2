"""The benchmark of the streamed codec decoder runs and holds both sides against one pass."""

from __future__ import annotations

import pytest

from tests.benchmarks.test_benchmarks import check_form, toy


@pytest.mark.slow
def test_code2wav() -> None:
    code, result = toy("code2wav", "--rounds", "1", "--streams", "2", "--pieces", "1")
    check_form(result, "code2wav")
    assert code == (0 if result["met"] else 1)
    assert result["error_of_peak"]["ours"] < 1e-4
    assert result["error_of_peak"]["peer"] is None, "chunked_decode loses samples at each seam"
