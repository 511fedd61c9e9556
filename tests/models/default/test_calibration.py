"""Reliability: predictions noted at decisions against rewards, and the coverage of intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from metaban.models.default.calibration import (
    BINS,
    COLUMNS,
    NEWEST,
    NORMAL_REACH,
    ReliabilityTable,
    reliability_and_reach,
)
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.notes import Notes
from metaban.models.default.samples import Samples
from tests.models.default_worlds import batch_of, generator_of, kinds, small

NOW = torch.zeros((), dtype=torch.float64)


def samples(
    mean: np.ndarray,
    rewards: np.ndarray,
    *,
    deviation: float = 0.5,
    reach: float = 0.8,
    epochs: np.ndarray | None = None,
) -> Samples:
    """Samples with these noted predictions."""
    notes = Notes(torch.zeros(len(mean), Notes.COUNT, dtype=torch.float64))
    notes.mean[:], notes.deviation[:], notes.reach[:] = (
        torch.from_numpy(mean),
        deviation,
        reach / deviation if deviation else 0.0,
    )
    when = np.zeros(len(mean), dtype=np.int64) if epochs is None else epochs
    count = torch.ones(len(mean), dtype=torch.float64)
    return Samples(torch.zeros(len(mean), 1), torch.from_numpy(rewards), notes, torch.from_numpy(when), count, count)


def reliability(given: Samples, since: torch.Tensor = NOW) -> ReliabilityTable | None:
    return ReliabilityTable.of({"reliability": reliability_and_reach(given, since)[0].numpy()})


def residual_terms(given: Samples) -> ReliabilityTable:
    found = reliability(given)
    assert found is not None
    return found


class TestReliability:
    def test_counts_bin_by_bin(self) -> None:
        """Bin counts against a loop; predictions outside the reward range go to the outer bins."""
        random = np.random.default_rng(1)
        mean, rewards = random.uniform(-0.3, 1.3, 700), (random.random(700) < 0.4).astype(np.float64)
        found, expected = residual_terms(samples(mean, rewards, reach=0.45)), np.zeros((BINS, COLUMNS))
        for one, reward in zip(mean, rewards, strict=True):
            predicted = min(max(one, 0.0), 1.0)
            inside = abs(reward - predicted) <= 0.45
            expected[min(int(predicted * BINS), BINS - 1)] += [1, predicted, reward, inside]
        np.testing.assert_allclose(found.table, expected)
        counts = expected[:, 0]
        gaps = [abs(row[1] - row[2]) / row[0] for row in expected]
        assert found.count == 700
        assert found.ece == pytest.approx(sum(n * gap for n, gap in zip(counts, gaps, strict=True)) / 700)
        assert found.mce == pytest.approx(max(gap for n, gap in zip(counts, gaps, strict=True) if n >= 50))
        assert found.coverage == pytest.approx(expected[:, 3].sum() / 700)

    def test_a_prediction_is_compared_with_the_reward_at_its_place(self) -> None:
        """A mean of 0.8 promises a reward of 0.4 at a place that half of the users look at."""
        given = samples(np.full(10, 0.8), np.full(10, 1.0))  # rewards of 0.5, as they would be at the first place
        found = residual_terms(replace(given, looks=torch.full((10,), 0.5, dtype=torch.float64)))
        assert found.table[4].tolist() == pytest.approx([10, 4, 5, 10])

    def test_calibrated_predictions_have_a_smaller_error(self) -> None:
        random = np.random.default_rng(2)
        mean = random.random(8_000)
        true = (random.random(8_000) < mean).astype(np.float64)
        assert residual_terms(samples(mean, true)).ece < 0.02
        assert residual_terms(samples(np.clip(mean + 0.2, 0, 1), true)).ece > 0.1
        assert residual_terms(samples(0.5 + 2 * (mean - 0.5), true)).ece > 0.05, "overconfident predictions"

    def test_bins_with_few_samples_do_not_set_the_largest_error(self) -> None:
        assert residual_terms(samples(np.full(49, 0.5), np.ones(49))).mce is None
        assert residual_terms(samples(np.full(50, 0.5), np.ones(50))).mce == pytest.approx(0.5)

    def test_without_samples_there_is_no_calibration(self) -> None:
        assert reliability(samples(np.ones(9), np.ones(9), deviation=0.0)) is None, "no deviation was noted"
        assert reliability(samples(np.full(9, np.nan), np.ones(9))) is None
        assert ReliabilityTable.of({"theta": np.zeros(3)}) is None, "a learner without notes"

    def test_counts_only_real_samples_since_the_last_change_of_tastes(self) -> None:
        mean, rewards = np.array([0.1, 0.2, 0.3, 0.4]), np.zeros(4)
        given = samples(mean, rewards, epochs=np.array([1, 2, 3, 3]))
        given = replace(given, weights=torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64))
        found = reliability(given, torch.tensor(2.0, dtype=torch.float64))
        assert found is not None
        assert found.table[:, 0].tolist() == [0, 0, 1, 1, *[0] * 6]

    def test_counts_only_the_newest_samples(self) -> None:
        old, new = 300, NEWEST - 100
        mean = np.concatenate([np.full(old, 0.15), np.full(new, 0.95)])
        epochs = np.concatenate([np.zeros(old, dtype=np.int64), np.ones(new, dtype=np.int64)])
        found = residual_terms(samples(mean, np.ones(old + new), epochs=epochs))
        assert found.count == NEWEST
        assert found.table[9, 0] == new, "all samples of the newest epoch, the rest from the one before"


class TestReach:
    def test_factor_is_the_normal_one_until_there_are_enough_samples(self) -> None:
        assert reliability_and_reach(samples(np.full(99, 0.5), np.ones(99)), NOW)[1] == NORMAL_REACH
        assert reliability_and_reach(samples(np.full(100, 0.5), np.ones(100)), NOW)[1] == 1.0

    @pytest.mark.parametrize("rate", [0.02, 0.3])
    def test_interval_covers_nine_of_ten_future_rewards(self, rate: float) -> None:
        """90 % intervals cover 90 % of 0/1 rewards; the normal interval would cover nearly all of them."""
        random = np.random.default_rng(3)
        mean = np.clip(rate + 0.1 * random.standard_normal(8_000), 0, 1)
        rewards = (random.random(8_000) < mean).astype(np.float64)
        known = float(reliability_and_reach(samples(mean[:4_000], rewards[:4_000]), NOW)[1])
        later = residual_terms(samples(mean[4_000:], rewards[4_000:], reach=0.5 * known))
        assert later.coverage == pytest.approx(0.9, abs=0.03)

    def test_factor_of_normal_rewards_is_near_the_normal_one(self) -> None:
        random = np.random.default_rng(4)
        rewards = 0.5 + 0.1 * random.standard_normal(9_000)
        found = reliability_and_reach(samples(np.full(9_000, 0.5), rewards, deviation=0.1), NOW)[1]
        assert float(found) == pytest.approx(NORMAL_REACH, abs=0.05)


def test_an_epoch_holds_the_calibration() -> None:
    learner = PosteriorLearner(small(), 3, torch.float64)
    people = kinds(learner, 8, 30, generator_of(5))
    for person in people:
        Notes(person.phi).deviation[:], Notes(person.phi).reach[:] = 0.4, 0.7
    shared = learner.initial_shared()
    assert ReliabilityTable.of({name: value.numpy() for name, value in shared.items()}) is None
    derived = learner.derive(shared, [batch_of(people, padding=2)], 0, 256)
    found = ReliabilityTable.of({name: value.numpy() for name, value in derived.items()})
    assert found is not None
    assert found.count == 240, "padding is not counted"
    predicted = torch.cat([Notes(person.phi).mean for person in people])
    assert found.table[:, 1].sum() == pytest.approx(float(predicted.sum()))
    assert derived["reach"] != NORMAL_REACH
    # A change in other users' notes does not affect the means.
    changed = batch_of(people, padding=2)
    for column in (Notes(changed.phi).mean, Notes(changed.phi).deviation, Notes(changed.phi).reach):
        column[:] = 0.3
    again = learner.derive(shared, [changed], 0, 256)
    for name in derived:
        assert torch.equal(derived[name], again[name]) == (name not in ("reach", "reliability")), name
