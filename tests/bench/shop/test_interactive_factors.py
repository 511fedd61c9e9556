"""Posteriors of interactive collaborative filtering against the formula, sample by sample."""

from __future__ import annotations

import numpy as np
import pytest

from metaban.bench.shop.interactive_factors import ALTERNATIONS, InteractiveFactors, Regressions
from metaban.bench.worlds.shop import Matrix
from tests.bench.shop.shops import catalogue, feedback


def slow_posterior(inputs: Matrix, targets: Matrix, variance: float, noise: float) -> tuple[Matrix, Matrix]:
    """Mean and covariance of N(0, variance·I) after samples with this noise."""
    precision = np.eye(inputs.shape[1]) / variance
    total = np.zeros(inputs.shape[1])
    for row, target in zip(inputs, targets, strict=True):
        precision = precision + np.outer(row, row) / noise
        total = total + target * row / noise
    covariance = np.linalg.inv(precision)
    return covariance @ total, covariance


def test_regressions_have_the_posterior_of_the_formula() -> None:
    random = np.random.default_rng(0)
    rows, inputs, targets = random.integers(5, size=40), random.standard_normal((40, 3)), random.standard_normal(40)
    fitted, added = Regressions(6, 3, 0.5, 0.2), Regressions(6, 3, 0.5, 0.2)
    fitted.fit(rows, inputs, targets)
    fitted.fit(rows, inputs, targets)  # a second fit does not count samples twice
    for start in range(0, 40, 9):
        part = slice(start, start + 9)
        added.add(rows[part], inputs[part], targets[part])
    for row in range(6):
        mean, covariance = slow_posterior(inputs[rows == row], targets[rows == row], 0.5, 0.2)
        for found in (fitted, added):
            assert found.means[row] == pytest.approx(mean)
            assert found.factors[row] @ found.factors[row].T == pytest.approx(covariance)


def test_draws_have_mean_and_covariance_of_the_posterior() -> None:
    random = np.random.default_rng(0)
    model = Regressions(1, 2, 1.0, 0.3)
    model.fit(np.zeros(5, dtype=np.int64), random.standard_normal((5, 2)), random.standard_normal(5))
    draws = model.draw(np.zeros(40_000, dtype=np.int64), random, 0.5)
    assert draws.mean(0) == pytest.approx(model.means[0], abs=0.01)
    assert np.cov(draws.T) == pytest.approx(0.25 * model.factors[0] @ model.factors[0].T, abs=0.01)


def player() -> InteractiveFactors:
    options = {"item_deviation": 0.3, "noise_deviation": 0.4, "draw_scale": 1.0, "decay": 0.8}
    return InteractiveFactors(catalogue(), users=4, seed=0, rank=2, **options)


def test_a_refit_alternates_between_the_posteriors_of_both_sides() -> None:
    found, shown = player(), feedback(150)
    of_items = found._items.means.copy()
    found.learn(shown)
    assert found._fitted_at == 150
    looked = np.array([0.8**each.position for each in shown])
    rewards = np.array([each.reward for each in shown])
    users, items = np.array([each.request.user for each in shown]), np.array([each.item for each in shown])
    mean = (rewards.sum() + 20 * 0.15) / (looked.sum() + 20)
    of_users = np.zeros((4, 2))
    for _ in range(ALTERNATIONS):
        for user in range(4):
            theirs = users == user
            known, factor = of_items[items[theirs]], looked[theirs, None]
            targets = rewards[theirs] - looked[theirs] * (mean + known[:, 2])
            of_users[user], covariance = slow_posterior(factor * known[:, :2], targets, 1.0, 0.16)
        for item in range(12):
            its = items == item
            inputs = looked[its, None] * np.column_stack([of_users[users[its]], np.ones(its.sum())])
            of_items[item], _ = slow_posterior(inputs, rewards[its] - looked[its] * mean, 0.09, 0.16)
    assert found._users.means == pytest.approx(of_users)
    assert found._items.means == pytest.approx(of_items)
    assert found._users.factors[3] @ found._users.factors[3].T == pytest.approx(covariance)


def test_between_refits_events_are_added_with_the_latest_means() -> None:
    found, shown = player(), feedback(153)
    found.learn(shown[:150])
    users, items = found._users.means.copy(), found._items.means.copy()
    found.learn(shown[150:])
    assert found._fitted_at == 150
    asked = {each.request.user for each in shown[150:]}
    seen = {each.item for each in shown[150:]}
    assert {row for row in range(4) if (found._users.means[row] != users[row]).any()} == asked
    assert {row for row in range(12) if (found._items.means[row] != items[row]).any()} == seen
