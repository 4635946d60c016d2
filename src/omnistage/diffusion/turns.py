"""Whose turn it is on a device that several shapes share."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.diffusion.active import ActiveRequest

PATIENCE = 0.5
"""How long a request waits for later ones with less work, as a share of its own work."""


def turn(denoising: Sequence[ActiveRequest]) -> list[ActiveRequest]:
    """The next wave, the most urgent first: all of the most urgent one's shape, without those that
    would hold up a request of another shape which was due before they came. `denoising` is not
    empty.

    A request is due when the device has done `PATIENCE` times its own work since it came, whoever
    that was for. Of two that came together the one with less work goes first, so that a small one
    slips in; of two with equal work the one that came first. Urgent is the earliest due, after the
    priority. Time is work done: the order depends on no clock.

    Nothing of a priority starves for its like: whoever is in a wave that leaves a request out came
    before it was due. (The first of a wave came before it was due itself, which is earlier; the
    others are chosen so.) So from then on it waits only for the steps of those that are here by
    then, at most `max_num_seqs` - 1.
    """
    ranked = sorted(denoising, key=lambda one: (_due(one), one.order))
    shape = ranked[0].batch_key
    left_out = [_due(one) for one in ranked if one.batch_key != shape]
    return [
        one
        for one in ranked
        if one.batch_key == shape and (not left_out or _came(one) <= left_out[0])
    ]


def _came(one: ActiveRequest) -> tuple[int, float]:
    return (-one.entry.identity.priority, one.work_before)


def _due(one: ActiveRequest) -> tuple[int, float]:
    return (-one.entry.identity.priority, one.work_before + PATIENCE * one.work)
