"""Small environments with linear rewards and known tastes, and the loop that plays them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from metaban.bench.baselines import build_baseline
from metaban.bench.baselines.base import Baseline

Matrix = NDArray[np.float64]

USERS, DIMENSION, ARMS = 6, 4, 8


class LinearWorld:
    """Rewards 0.5 + tasteᵀx/4 with a little noise, where x is a normal vector; users take turns at random."""

    def __init__(
        self, *, seed: int, tastes: int = 1, users: int = USERS, dimension: int = DIMENSION, variety: float = 0.0
    ) -> None:
        self._random = np.random.default_rng(seed)
        taste = self._random.standard_normal(dimension)
        # With two tastes, every other user likes what the rest dislikes.
        self._tastes = np.stack([taste if user % tastes == 0 else -taste for user in range(users)])  # [n, d]
        self._tastes += variety * self._random.standard_normal(self._tastes.shape)
        self._tastes /= np.linalg.norm(taste)

    def next_round(self) -> tuple[int, Matrix, Matrix]:
        """A user, arms [k, d], and the expected reward of each [k]."""
        user = int(self._random.integers(len(self._tastes)))
        arms = self._random.standard_normal((ARMS, self._tastes.shape[1]))  # [k, d]
        return user, arms, 0.5 + arms @ self._tastes[user] / 4

    def reward(self, worth: float) -> float:
        """Reward of an arm."""
        return float(worth + 0.05 * self._random.standard_normal())


def small(name: str, *, seed: int = 0, users: int = USERS, dimension: int = DIMENSION, **settings: Any) -> Baseline:
    """A baseline for these environments."""
    return build_baseline(name, users=users, dimension=dimension, seed=seed, settings=settings)


def play(baseline: Baseline, world: LinearWorld, rounds: int, users: int = USERS) -> tuple[list[int], Matrix]:
    """Choices, and the regret of each round as a share of a random arm's, for users below a number."""
    choices, shares = [], []
    while len(choices) < rounds:
        user, arms, worth = world.next_round()
        if user >= users:
            continue
        choice = baseline.choose(user, arms)
        baseline.learn(user, arms[choice], world.reward(worth[choice]))
        choices.append(choice)
        shares.append((worth.max() - worth[choice]) / (worth.max() - worth.mean()))
    return choices, np.array(shares)
