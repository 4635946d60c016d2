"""The progress bar of `Omni.generate`."""

from __future__ import annotations

import warnings

import pytest

from omnistage.contracts.outputs import OmniProgress, OmniRequestOutput
from omnistage.engine.progress import ProgressReport


def test_fractions_add_up_to_the_number_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    """Thirds and sevenths of steps neither overshoot nor end short of the total."""
    with warnings.catch_warnings(), ProgressReport(3, enabled=True) as report:
        warnings.simplefilter("error")
        for step in range(1, 8):
            for request_id, total in (("a", 3), ("b", 7), ("c", 6)):
                progress = OmniProgress(stage_id=0, step=min(step, total), total_steps=total)
                report.update(OmniRequestOutput(request_id=request_id, progress=progress))
        for request_id in "abc":
            report.finish(request_id)
        assert report._bar is not None
        assert report._bar.n == 3
    assert "100%" in capsys.readouterr().err


def test_no_bar_where_none_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReport(1, enabled=False) as report:
        report.finish("a")
    assert capsys.readouterr().err == ""
