"""Schedules of growing event counts, against counting."""

from __future__ import annotations

import math

import pytest

from metaban.models.numerics.schedule import FIRST_EPOCH_EVENTS, doubled, grown


def test_doubled_once_for_each_power_of_two() -> None:
    due = [total for total in range(1, 5_000) if doubled(total - 1, total)]
    assert due == [2**power for power in range(4, 13)]
    assert not doubled(0, FIRST_EPOCH_EVENTS - 1)
    assert doubled(0, FIRST_EPOCH_EVENTS)
    assert not doubled(40, 40)


@pytest.mark.parametrize("growth", [1.3, 2.5, 3.0, 10.0])
def test_grown_once_for_each_power(growth: float) -> None:
    due = [total for total in range(2, 5_000) if grown(total - 1, total, growth)]
    powers = [growth**power for power in range(1, 40) if growth**power < 4_999]
    assert due == sorted({math.ceil(power) for power in powers})
    assert grown(100, int(100 * growth * growth) + 1, growth), "also when several powers are passed at once"
    assert not grown(100, 100, growth)
    assert not grown(0, 0, growth)
