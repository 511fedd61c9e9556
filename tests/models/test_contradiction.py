"""Two populations of users and whose taste the others contradict, against loops over users and samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import multivariate_normal
from torch import Tensor

from models.contradiction import FIRST_LEAN, STEPS, STEPS_ALONE, contradiction, smaller_population
from models.prior import UNSEEN_SPREAD, UNSEEN_USERS, Prior, Statistics
from tests.models.test_prior import Crowd

Matrix = NDArray[np.float64]

DIMENSION = 3
USERS = 30
FEW = 7


def crowd_of_two(*, turned: float, level: float = 0.0, seed: int = 0) -> Crowd:
    """Users alike, but for the last 7, whose taste is the others' times `turned`, and their level higher by so much."""
    crowd = Crowd(USERS, 16, DIMENSION, seed)
    crowd.heads = np.array([0.4, 1.0, -0.7]) + 0.3 * crowd.random.normal(size=crowd.heads.shape)
    crowd.heads[-FEW:, 1:] *= turned
    crowd.heads[-FEW:, 0] += level
    crowd.inputs[..., 0] = 1.0
    crowd.counts = crowd.random.integers(6, 17, size=USERS)
    crowd.reward()
    return crowd


def learned(users: Statistics) -> Prior:
    prior = Prior.initial(DIMENSION)
    for _ in range(20):
        prior = prior.improved(users)
    return prior


def loud(users: Statistics) -> Tensor:
    return users.events / (users.events + 5)


class TestPopulations:
    @pytest.mark.parametrize("turned", [-1.0, 0.6])
    def test_against_loops(self, turned: float) -> None:
        """EM user by user and population by population, by the density of all rewards of a user."""
        crowd = crowd_of_two(turned=turned)
        users = crowd.statistics()
        prior = learned(users)
        points, voice = prior.posterior_mean(users.gram, users.moment), loud(users)
        found = smaller_population(prior, users, points, voice)
        noise, weight = float(prior.noise), voice.numpy()
        apart = points.numpy() - weight @ points.numpy() / weight.sum()
        spread = sum(w * np.outer(a, a) for w, a in zip(weight, apart, strict=True))
        side = apart @ np.linalg.eigh(spread)[1][:, -1]
        side /= np.sqrt((weight * side**2).sum() / weight.sum())
        beliefs = [1 / (1 + np.exp(-FIRST_LEAN * side)), 1 / (1 + np.exp(FIRST_LEAN * side))]
        priors: list[tuple[Matrix, Matrix]] = [(prior.mean.numpy(), prior.covariance.numpy())] * 2
        for _ in range(STEPS):
            priors = [fitted(crowd, belief, *before, noise) for belief, before in zip(beliefs, priors, strict=True)]
            joint = np.array(
                [
                    [belief.mean() * density(crowd, user, *each, noise) for user in range(USERS)]
                    for belief, each in zip(beliefs, priors, strict=True)
                ]
            )
            beliefs = list(joint / joint.sum(0))
        expected = min(beliefs, key=lambda belief: float(belief.sum()))
        np.testing.assert_allclose(found, expected, atol=1e-6)

    @pytest.mark.parametrize("seed", range(3))
    def test_who_wants_the_opposite_is_told_apart(self, seed: int) -> None:
        users = crowd_of_two(turned=-1.0, seed=seed).statistics()
        prior = learned(users)
        belief = smaller_population(prior, users, prior.posterior_mean(users.gram, users.moment), loud(users))
        assert (belief[-FEW:] > 0.9).all()
        assert (belief[:-FEW] > 0.5).sum() <= 2, "some samples are few"

    def test_users_who_are_all_the_same(self) -> None:
        users = crowd_of_two(turned=1.0).statistics().rows(torch.zeros(USERS, dtype=torch.int64))
        prior = learned(users)
        belief = smaller_population(prior, users, prior.posterior_mean(users.gram, users.moment), loud(users))
        torch.testing.assert_close(belief, torch.full_like(belief, 0.5), atol=0.01, rtol=0)


class TestContradiction:
    def test_against_loops_over_samples(self) -> None:
        crowd = crowd_of_two(turned=0.3, level=1.0)
        users = crowd.statistics()
        prior = learned(users)
        some = torch.arange(USERS) >= USERS - FEW
        alone = prior
        for _ in range(STEPS_ALONE):
            alone = alone.improved(users, some.double())
        rises = []
        for user in range(USERS):
            h, r = crowd.samples(user)
            said = h[:, 1:] @ alone.mean[1:].numpy()
            rises.append(np.mean([(s - said.mean()) * (reward - r.mean()) for s, reward in zip(said, r, strict=True)]))
        expected = -np.mean(rises) / (np.std(rises, ddof=1) / np.sqrt(USERS))
        assert float(contradiction(prior, users, some)) == pytest.approx(expected)

    @pytest.mark.parametrize("seed", range(3))
    def test_opposite_tastes_and_other_levels(self, seed: int) -> None:
        some = torch.arange(USERS) >= USERS - FEW
        opposite = crowd_of_two(turned=-1.0, seed=seed).statistics()
        assert contradiction(learned(opposite), opposite, some) > 1
        eager = crowd_of_two(turned=1.0, level=5.0, seed=seed).statistics()
        assert contradiction(learned(eager), eager, some) < -4

    @pytest.mark.parametrize("seed", range(5))
    def test_sides_of_tastes_that_spread_do_not_go_against_everybody(self, seed: int) -> None:
        """Nobody is of another kind; cut in two along what they differ in most, both sides want the opposite."""
        crowd = Crowd(USERS, 16, DIMENSION, seed)
        crowd.heads = crowd.random.normal(size=crowd.heads.shape) * np.array([0.1, 1.0, 0.1])
        crowd.inputs[..., 0] = 1.0
        crowd.counts[:] = 16
        crowd.reward()
        users = crowd.statistics()
        assert contradiction(learned(users), users, torch.from_numpy(crowd.heads[:, 1] > 0.3)) < 2


def fitted(crowd: Crowd, belief: Matrix, mean: Matrix, covariance: Matrix, noise: float) -> tuple[Matrix, Matrix]:
    """Mean and covariance of a population by moments of its users' posteriors, one by one."""
    posteriors = []
    for user in range(USERS):
        h, r = crowd.samples(user)
        spread = np.linalg.inv(h.T @ h / noise + np.linalg.inv(covariance))
        posteriors.append((spread @ (h.T @ r / noise + np.linalg.solve(covariance, mean)), spread))
    centre = sum(b * m for b, (m, _) in zip(belief, posteriors, strict=True)) / belief.sum()
    total = UNSEEN_USERS * UNSEEN_SPREAD * noise * np.eye(DIMENSION)
    for b, (m, spread) in zip(belief, posteriors, strict=True):
        total = total + b * (spread + np.outer(m - centre, m - centre))
    return centre, total / (belief.sum() + UNSEEN_USERS)


def density(crowd: Crowd, user: int, mean: Matrix, covariance: Matrix, noise: float) -> float:
    """Of all rewards of a user, as one normal vector."""
    h, r = crowd.samples(user)
    return float(multivariate_normal(h @ mean, h @ covariance @ h.T + noise * np.eye(len(r))).pdf(r))
