"""Thompson sampling: propensities are counted from draws and exact, and choices follow them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from metaban.models.default.learner import PosteriorLearner
from metaban.models.learner import Query
from metaban.models.numerics.slates import Slates
from metaban.models.policies import Policy, Thompson, build_policy, decision_draws, draw_slate
from metaban.models.posterior_draws import Draws, draws_seed
from tests.models.default_worlds import epoch_with_kinds, fitted, generator_of, kinds, small

MEAN = np.array([0.5, 0.45, 0.3])
NONE = np.zeros(3)


def chances(policy: Policy, drawn: np.ndarray, mean: np.ndarray = MEAN) -> np.ndarray:
    return policy.probabilities(mean, np.zeros(len(mean)), drawn)


class TestShares:
    #: The best arms are 0, 0, 1, and in the last draw both 1 and 2.
    DRAWN = np.array([[0.9, 0.8, 0.1, 0.2], [0.5, 0.1, 0.2, 0.7], [0.2, 0.3, 0.0, 0.7]])

    def test_counts_share_ties_and_add_one_draw_for_all(self) -> None:
        expected = (np.array([2, 1.5, 0.5]) + 1 / 3) / 5
        assert chances(Thompson(4, 1.0), self.DRAWN) == pytest.approx(expected)

    def test_every_arm_has_a_positive_propensity(self) -> None:
        never = np.array([[1.0] * 8, [0.0] * 8, [0.0] * 8])
        found = chances(Thompson(8, 1.0), never)
        assert found == pytest.approx([25 / 27, 1 / 27, 1 / 27])
        assert found.sum() == pytest.approx(1.0, abs=1e-15)

    def test_a_scale_moves_draws_towards_the_mean(self) -> None:
        drawn = np.array([[0.4, 0.5], [0.6, 0.5], [0.3, 0.3]])
        assert chances(Thompson(2, 1.0), drawn) * 9 == pytest.approx([2.5, 5.5, 1])
        assert chances(Thompson(2, 0.1), drawn) * 9 == pytest.approx([7, 1, 1])
        assert chances(Thompson(2, 0.0), drawn, np.array([0.5, 0.5, 0.1])) * 9 == pytest.approx([4, 4, 1])

    def test_a_bonus_is_added_to_every_draw(self) -> None:
        drawn = np.array([[0.4, 0.5], [0.6, 0.5], [0.3, 0.3]])
        found = Thompson(2, 1.0).probabilities(MEAN, np.array([0.0, 0.0, 0.25]), drawn)
        assert found * 9 == pytest.approx([1, 4, 4])  # 0.3 + 0.25 is the best of the second draw
        found = Thompson(2, 0.0).probabilities(MEAN, np.array([0.0, 0.1, 0.0]), drawn)
        assert found * 9 == pytest.approx([1, 7, 1])

    def test_many_draws_converge_to_the_probability_of_being_best(self) -> None:
        """For two arms this is known: P(a > b) = Φ((m_a − m_b)/√(s_a² + s_b²))."""
        count, random = 40_000, np.random.default_rng(1)
        mean, deviation = np.array([0.5, 0.4]), np.array([0.1, 0.2])
        drawn = mean[:, None] + deviation[:, None] * random.standard_normal((2, count))
        wanted = norm.cdf(0.1 / np.hypot(*deviation))
        assert chances(Thompson(count, 1.0), drawn, mean)[0] == pytest.approx(wanted, abs=4 * 0.5 / count**0.5)

    def test_invalid_arguments_are_refused(self) -> None:
        with pytest.raises(ValueError, match="draws"):
            Thompson(0, 1.0)
        for scale in (-0.1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="scale"):
                Thompson(4, scale)
        policy = build_policy("thompson", epsilon=0.1, squarecb_gamma=3.0, thompson_draws=4, thompson_scale=1.0)
        assert (policy.name, policy.draws) == ("thompson", 4)
        for drawn in (None, self.DRAWN[:, :3], self.DRAWN[:2]):
            with pytest.raises(ValueError, match="4 draws"):
                policy.probabilities(MEAN, NONE, drawn)
        with pytest.raises(ValueError, match="finite"):
            draw_slate(policy, MEAN, NONE, 1, iter([0.5]), self.DRAWN * np.array([1, 1, 1, np.nan]))


def test_each_position_uses_the_remaining_arms() -> None:
    """The probability of a slate is the product of its propensities; those of all slates sum to 1."""
    policy, random = Thompson(7, 1.0), np.random.default_rng(2)
    drawn, mean = random.standard_normal((4, 7)), np.zeros(4)
    chance = {}
    for slate in permutations(range(4), 3):
        left, product = [0, 1, 2, 3], []
        for arm in slate:
            best = [max(left, key=lambda each: drawn[each, column]) for column in range(7)]
            product.append((best.count(arm) + 1 / len(left)) / 8)
            left.remove(arm)
        chance[slate] = product
    assert sum(float(np.prod(each)) for each in chance.values()) == pytest.approx(1.0)
    seen = set()
    for number in range(300):
        found = draw_slate(policy, mean, np.zeros(4), 3, decision_draws(1, str(number)), drawn)
        assert found.propensities == pytest.approx(chance[found.chosen])
        seen.add(found.chosen)
    assert len(seen) > 5


def fit(observed: np.ndarray, propensities: np.ndarray) -> float:
    """p value of a goodness-of-fit test of choices [n, k] (one-hot) with these probabilities, which differ by row.

    Σ(seen − expected) has the covariance Σ(diag(p) − ppᵀ), of rank k − 1.
    """
    apart = (observed - propensities).sum(0)[:-1]
    covariance = np.diag(propensities.sum(0)) - propensities.T @ propensities
    statistic = float(apart @ np.linalg.solve(covariance[:-1, :-1], apart))
    return float(chi2.sf(statistic, len(apart)))


def test_choices_follow_the_logged_propensities() -> None:
    """Over many decisions of one user on the same arms, each with its own draws."""
    learner = PosteriorLearner(small(), 3)
    shared = epoch_with_kinds(learner, kinds(learner, 8, 6, generator_of(3)))
    epoch = learner.prepare_epoch(shared)
    initial_user = {name: value.unsqueeze(0) for name, value in learner.initial_user(shared).items()}
    brief = epoch.prepare_draws(epoch.prepare_users(initial_user))
    pool, arms = fitted(learner, shared, []), torch.randn(4, 3, generator=generator_of(4))
    policy, rounds = Thompson(16, 1.0), 3_000
    # In one micro-batch: each decision gets what it would get alone.
    query = Query(
        arms=arms.repeat(rounds, 1),
        slates=Slates([4] * rounds),
        own={name: value.expand(rounds, *value.shape[1:]) for name, value in brief.items()},
        own_row=torch.full((rounds,), -1),
        own_events=torch.zeros(rounds, dtype=torch.int64),
        draws=Draws(16, [draws_seed(9, f"d{number}") for number in range(rounds)]),
    )
    scores = epoch.score(pool, query)
    assert scores.draws is not None
    mean, drawn = scores.mean.double().numpy().reshape(rounds, 4), scores.draws.double().numpy().reshape(rounds, 4, 16)
    propensities = np.stack([chances(policy, each, one) for each, one in zip(drawn, mean, strict=True)])
    observed = np.zeros((rounds, 4))
    for number in range(rounds):
        shares = decision_draws(9, f"d{number}")
        slate = draw_slate(policy, mean[number], np.zeros(4), 1, shares, drawn[number])
        assert slate.propensities[0] == propensities[number, slate.chosen[0]]
        observed[number, slate.chosen[0]] = 1
    assert propensities.std(0).min() > 0.01, "draws differ between decisions"
    assert fit(observed, propensities) > 1e-3
    # The test can fail: for an argmax of the means, and for a floor that is reported too large.
    greedy = np.eye(4)[mean.argmax(1)]
    assert fit(greedy, propensities) < 1e-6
    assert fit(observed, 0.8 * propensities + 0.2 / 4) < 1e-3
