from __future__ import annotations

import pytest

from omnistage.observability.playback import PlaybackClock


@pytest.mark.parametrize(
    ("pieces", "underrun_s"),
    [
        ([(10.0, 1.0)], 0.0),
        ([(10.0, 1.0), (10.5, 1.0), (11.9, 1.0)], 0.0),
        ([(10.0, 1.0), (11.25, 1.0)], 0.25),
        ([(10.0, 1.0), (11.25, 1.0), (12.0, 1.0), (13.75, 1.0)], 0.75),
        ([(10.0, 1.0), (10.1, 5.0), (18.0, 1.0)], 2.0),
        ([(10.0, 0.0), (20.0, 1.0), (21.5, 1.0)], 0.5),
    ],
)
def test_a_player_stands_still_when_nothing_is_left(
    pieces: list[tuple[float, float]], underrun_s: float
) -> None:
    clock = PlaybackClock()
    for now_s, piece_s in pieces:
        clock.arrive(now_s, piece_s)
    assert clock.underrun_s == pytest.approx(underrun_s)
    assert clock.duration_s == pytest.approx(sum(piece_s for _, piece_s in pieces))
