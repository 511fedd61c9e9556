"""Pauses between checks: they grow while nothing is found, and are never put off by what happens meanwhile."""

from __future__ import annotations

import pytest

from metaban.worker.learning.pauses import QUIET_PAUSE_MAX_S, QuietChecks, until_next


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        monkeypatch.setattr("metaban.worker.learning.pauses.time.monotonic", lambda: self.now_s)

    def wait_due(self, checks: QuietChecks) -> float:
        """Seconds until a check is due, looking once a second."""
        began_s = self.now_s
        self.now_s += 1
        while not checks.due:
            self.now_s += 1
        return self.now_s - began_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_pauses_double_until_something_is_found(clock: Clock) -> None:
    checks = QuietChecks(1.0)
    assert checks.due
    pauses = []
    for _ in range(5):
        checks.done(quiet=True)
        pauses.append(clock.wait_due(checks))
    assert pauses == [2, 4, 8, 8, 8]
    assert max(pauses) == QUIET_PAUSE_MAX_S
    checks.done(quiet=False)
    assert clock.wait_due(checks) == 1


def test_a_check_is_not_put_off_while_things_keep_happening(clock: Clock) -> None:
    checks = QuietChecks(1.0)
    for _ in range(3):
        checks.done(quiet=True)
    checks.hurry()
    for _ in range(9):
        assert not checks.due
        clock.now_s += 0.05
        checks.hurry()
    clock.now_s += 0.1
    assert checks.due


@pytest.mark.parametrize("late_s", [-0.001, 0.0, 0.001])
def test_timers_that_are_a_little_early_or_late_end_with_the_next_period(clock: Clock, late_s: float) -> None:
    clock.now_s = 30.0 + late_s
    assert clock.now_s + until_next(0.5) == pytest.approx(30.5)
