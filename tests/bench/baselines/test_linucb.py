"""LinUCB against the textbook formula, and the standardiser against explicit standardisation."""

from __future__ import annotations

import numpy as np
import pytest

from metaban.bench.baselines.base import with_intercept
from metaban.bench.baselines.linucb import LinUCB
from metaban.bench.baselines.standardizer import FIRST_ARMS, SETTLED_ARMS, Standardizer
from tests.bench.baselines.linear_worlds import DIMENSION, USERS, LinearWorld, Matrix


def standardised(model: Standardizer, arms: Matrix) -> Matrix:
    """Arms [k, d] under the moments in use, with the intercept appended."""
    return with_intercept((arms - model.mean) / model.deviation)


def textbook_bounds(samples: list[tuple[Matrix, float]], inputs: Matrix, penalty: float, exploration: float) -> Matrix:
    """xᵀA⁻¹b + α·√(xᵀA⁻¹x), one arm after the other."""
    a, b = penalty * np.eye(inputs.shape[1]), np.zeros(inputs.shape[1])
    for x, reward in samples:
        a += np.outer(x, x)
        b += reward * x
    inverse = np.linalg.inv(a)
    return np.array([x @ inverse @ b + exploration * np.sqrt(x @ inverse @ x) for x in inputs])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("standardize", [True, False])
def test_bounds_equal_the_textbook_formula(shared: bool, standardize: bool) -> None:
    model = LinUCB(
        users=USERS,
        dimension=DIMENSION,
        regularization=0.3,
        exploration=0.7,
        standardize=standardize,
        shared=shared,
    )
    world = LinearWorld(seed=1, tastes=2)
    history: list[tuple[int, Matrix, float]] = []
    for _ in range(80):
        user, arms, worth = world.next_round()
        arms = 2.0 + 3.0 * arms
        choice = model.choose(user, arms)
        samples = [
            (standardised(model.standardizer, arm[None])[0], reward)
            for owner, arm, reward in history
            if shared or owner == user
        ]
        expected = textbook_bounds(samples, standardised(model.standardizer, arms), 0.3, 0.7)
        assert model.bounds(user, with_intercept(arms)) == pytest.approx(expected, rel=1e-7)
        assert choice == expected.argmax()
        history.append((user, arms[choice], world.reward(worth[choice])))
        model.learn(*history[-1])


def test_moments_equal_those_of_all_arms_even_far_from_zero() -> None:
    random = np.random.default_rng(2)
    model, seen = Standardizer(3, 1.0, enabled=True), []
    while not model.observe(slate := random.normal([1e6, 0.0, -4.0], [1.0, 5.0, 0.2], (5, 3))):
        seen.append(slate)
    rows = np.concatenate([*seen, slate])
    assert len(rows) == FIRST_ARMS
    assert model.mean == pytest.approx(rows.mean(0))
    assert model.deviation == pytest.approx(rows.std(0), rel=1e-5)


def test_moments_settle() -> None:
    random = np.random.default_rng(3)
    model = Standardizer(1, 1.0, enabled=True)
    renewals = [count for count in range(100, 4 * SETTLED_ARMS, 100) if model.observe(random.normal(size=(100, 1)))]
    assert renewals == [100 * 2**power for power in range(len(renewals))]
    assert renewals[-2] < SETTLED_ARMS <= renewals[-1]


def test_constant_columns_are_unchanged() -> None:
    model = Standardizer(2, 0.5, enabled=True)
    model.observe(np.column_stack([np.full(FIRST_ARMS, 7.0), np.arange(FIRST_ARMS)]))
    assert (model.mean[0], model.deviation[0]) == (0.0, 1.0)
    assert model.deviation[1] > 1


def test_weights_and_penalty_equal_those_of_standardised_inputs() -> None:
    random = np.random.default_rng(4)
    model = Standardizer(3, 0.5, enabled=True)
    arms = random.normal([5.0, -1.0, 0.0], [2.0, 0.1, 1.0], (FIRST_ARMS, 3))
    assert model.observe(arms)
    raw, standard = with_intercept(arms), standardised(model, arms)
    weights = random.standard_normal((2, 4))
    assert standard @ model.standard_weights(weights).T == pytest.approx(raw @ weights.T)
    for row in weights:
        assert row @ model.penalty @ row == pytest.approx(0.5 * np.sum(model.standard_weights(row) ** 2))


def test_switched_off_it_is_plain_ridge() -> None:
    model = Standardizer(2, 0.5, enabled=False)
    assert not any(model.observe(np.random.default_rng(5).normal(size=(50, 2))) for _ in range(10))
    # The intercept is penalised like every other weight.
    assert np.array_equal(model.penalty, 0.5 * np.eye(3))
