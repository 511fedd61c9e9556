"""Changes of tastes: what counts as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metaban.models.default.drift import DRIFT_SAMPLES, drift_detected
from metaban.models.default.notes import Notes
from metaban.models.default.samples import Samples


def since_of(epoch: float) -> Tensor:
    return torch.tensor(epoch, dtype=torch.float64)


def samples_with_shortfall(*parts: tuple[int, int, float]) -> Samples:
    """Samples given as (epoch, count, amount by which rewards fell short of the prediction)."""
    generator = torch.Generator().manual_seed(0)
    epochs = torch.cat([torch.full((count,), epoch) for epoch, count, _ in parts])
    short = torch.cat([torch.full((count,), by) for _, count, by in parts]).double()
    rewards = torch.rand(epochs.shape[0], generator=generator, dtype=torch.float64)
    notes = Notes(torch.zeros(epochs.shape[0], Notes.COUNT, dtype=torch.float64))
    notes.mean[:] = 0.5 + short
    nothing, ones = torch.zeros(epochs.shape[0], 1), torch.ones(epochs.shape[0])
    return Samples(nothing, rewards, notes, epochs, ones, ones)


MANY = 4 * DRIFT_SAMPLES


@pytest.mark.parametrize(
    ("parts", "since", "expected"),
    [
        ([(3, MANY, 0.0), (8, MANY, 0.0), (9, MANY, 0.0)], 0, False),  # as before
        ([(3, MANY, 0.0), (8, MANY, 0.4), (9, MANY, 0.4)], 0, True),  # much worse in the latest two epochs
        ([(3, MANY, 0.0), (8, MANY, -0.4), (9, MANY, -0.4)], 0, False),  # better than predicted
        ([(3, MANY, 0.0), (7, MANY, 0.4), (9, MANY, 0.0)], 0, False),  # worse, but not recently
        ([(3, MANY, 0.2), (9, MANY, 0.2)], 0, False),  # always a little worse: the best of many arms is overestimated
        ([(3, MANY, 0.0), (9, DRIFT_SAMPLES - 1, 0.9)], 0, False),  # too few samples
        ([(3, DRIFT_SAMPLES - 1, 0.0), (9, MANY, 0.9)], 0, False),
        ([(3, MANY, 0.0), (6, MANY, 0.4), (9, MANY, 0.4)], 5, False),  # no change since the last one
        ([(3, MANY, 0.4), (6, MANY, 0.0), (9, MANY, 0.4)], 5, True),
    ],
)
def test_recent_rewards_below_predictions_are_a_change_of_tastes(
    parts: list[tuple[int, int, float]], since: int, expected: bool
) -> None:
    assert bool(drift_detected(samples_with_shortfall(*parts), since_of(9), since_of(since))) == expected


@pytest.mark.parametrize(("skill", "expected"), [(0.0, True), (0.5, False)])
def test_predictions_that_are_better_than_a_mean_are_kept(skill: float, expected: bool) -> None:
    """A shortfall that many samples make significant is a change of tastes only if predictions are of no use."""
    samples = samples_with_shortfall((3, 16 * MANY, 0.0), (9, 16 * MANY, 0.1))
    samples.notes.mean[:] += skill * (samples.rewards - 0.5)
    assert bool(drift_detected(samples, since_of(9), since_of(0))) == expected


def test_first_predictions_are_no_change_of_tastes() -> None:
    """Before the first epoch there are no predictions; having them afterwards is no change of tastes."""
    first = (0, MANY, -0.5)
    assert not drift_detected(samples_with_shortfall(first, (1, MANY, 0.0)), since_of(2), since_of(0))
    assert not drift_detected(samples_with_shortfall(first, (1, MANY, 0.0), (2, MANY, 0.05)), since_of(2), since_of(0))
