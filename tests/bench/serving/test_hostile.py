"""What the ratio of latencies under attack counts, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

from metaban.bench.serving.hostile import median_ratio

TURNS = [list(np.random.default_rng(seed).uniform(0.005, 0.01, size=200)) for seed in range(14)]
QUIET, ATTACKED = TURNS[:7], TURNS[7:]


def with_pause(turn: list[float]) -> list[float]:
    """The requests of a turn in which the machine stood still for 200 ms: those behind were late as well."""
    return [*turn[:100], 0.2, 0.18, 0.16, 0.14, *turn[104:]]


@pytest.mark.parametrize("paused", range(4))
def test_pauses_in_fewer_than_half_of_the_turns_are_not_an_attack(paused: int) -> None:
    attacked = [with_pause(turn) for turn in ATTACKED[:paused]] + ATTACKED[paused:]
    assert median_ratio(QUIET, attacked) < 1.5


def test_pauses_in_every_attacked_turn_are_one() -> None:
    assert median_ratio(QUIET, [with_pause(turn) for turn in ATTACKED]) > 3


def test_a_slow_machine_is_not_an_attack() -> None:
    slow = [[10 * seconds for seconds in turn] for turn in TURNS]
    assert median_ratio(slow[:7], slow[7:]) == pytest.approx(median_ratio(QUIET, ATTACKED))
