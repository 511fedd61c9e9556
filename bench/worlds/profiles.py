"""Environments whose users have profiles: a simulated one where profiles predict taste, and MovieLens, where they
hardly do.

A round is determined by a user and a number, so all methods see the same rounds in any order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, final

import numpy as np

from metaban.bench.worlds.data import data_folder, movielens_profiles, movielens_ratings
from metaban.bench.worlds.environments import EnvironmentRound, Matrix, RatedItems

#: Arms of a round, numbers per arm, numbers per profile, and waves of the map from profile to taste.
ARMS, DIMENSION, PROFILE, WAVES = 10, 4, 3, 6

#: Chance of a reward for the best and the worst possible arm, and the width of a taste.
HIGH, LOW, WIDTH = 0.95, 0.05, 0.6

#: How fast tastes change with the profile, and how far a user's taste is from what the profile predicts.
FREQUENCY, OWN = 1.2, 0.2


class ProfiledWorld(Protocol):
    """Users with profiles [users, d], and rounds of each."""

    users: int
    dimension: int
    profiles: Matrix

    def round_of(self, user: int, number: int) -> EnvironmentRound:
        """The user's round with this number."""


@final
class ProfileWorld:
    """Tastes that follow profiles along a smooth, non-linear map, up to individual noise.

    A profile τ is uniform in [−1, 1]³. The taste of its user is the unit vector along v(τ) + 0.2·ε, ε ~ N(0, I₄), with
    v(τ) the unit vector along Σ_j a_j sin(1.2·ω_jᵀτ + φ_j) over 6 waves: a_j ~ N(0, I₄), ω_j ~ N(0, I₃), φ_j uniform in
    [0, 2π), the same for all users of a seed. A round has 10 arms x, uniform on the unit sphere of R⁴. An arm has
    reward 1 with chance 0.05 + 0.9·exp(−‖x − taste‖²/0.6), else 0. Given the map, a profile determines the taste except
    for ε.
    """

    def __init__(self, *, seed: int, users: int) -> None:
        random = np.random.default_rng(seed)
        self.users = users
        self.dimension = DIMENSION
        weights = random.standard_normal((WAVES, DIMENSION))
        waves = FREQUENCY * random.standard_normal((PROFILE, WAVES))
        phases = random.uniform(0, 2 * np.pi, WAVES)
        self.profiles: Matrix = random.uniform(-1, 1, (users, PROFILE))
        told = _unit(np.sin(self.profiles @ waves + phases) @ weights)
        self._tastes = _unit(told + OWN * random.standard_normal((users, DIMENSION)))
        self._seed = seed

    def round_of(self, user: int, number: int) -> EnvironmentRound:
        random = np.random.default_rng([self._seed, user, number])
        arms = _unit(random.standard_normal((ARMS, DIMENSION)))
        squares = np.square(arms - self._tastes[user]).sum(-1)
        chances = LOW + (HIGH - LOW) * np.exp(-squares / WIDTH)
        return EnvironmentRound(user, arms, chances, (random.random(ARMS) < chances).astype(np.float64))


@final
class RatedProfiles:
    """All MovieLens users with enough ratings, in seeded random order; profiles are age, gender and occupation.

    Rounds are those of `RatedItems`: one film that the user rated 5 among nine that they rated at most 3.
    """

    def __init__(self, *, seed: int, data: Path | None = None) -> None:
        folder = data_folder(data)
        ratings = movielens_ratings(folder)
        self._rated = RatedItems(ratings, seed=seed, most=len(ratings))
        self._order = np.random.default_rng(seed).permutation(self._rated.users)
        self._seed = seed
        self.users = self._rated.users
        self.dimension = self._rated.dimension
        self.profiles: Matrix = movielens_profiles(folder)[self._rated.rows[self._order]]

    def round_of(self, user: int, number: int) -> EnvironmentRound:
        return self._rated.round_of(int(self._order[user]), np.random.default_rng([self._seed, user, number]))


def _unit(rows: Matrix) -> Matrix:
    unit: Matrix = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return unit
