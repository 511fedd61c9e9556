"""Worlds to play in: who asks, which arms there are, and what each arm would earn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Round:
    """One question: a user, the features of the arms [k, d], and the chance of a reward of each [k]."""

    user_id: str
    arms: Matrix
    chances: Matrix


@final
class SyntheticGroups:
    """Users in hidden groups whose tastes are bumps on the unit sphere: non-linear, and told apart by no feature.

    An arm x, drawn uniformly from the sphere, earns 1 with chance low + (high − low)·exp(−‖x − c_g‖²/spread), where c_g
    is the taste of the user's group. The tastes of two groups lie on opposite sides, up to noise.
    """

    def __init__(
        self,
        *,
        seed: int,
        users: int = 12,
        groups: int = 2,
        arms: int = 6,
        dimension: int = 4,
        low: float = 0.02,
        high: float = 0.98,
        spread: float = 0.8,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._users = users
        self._arms = arms
        self._low, self._high, self._spread = low, high, spread
        tastes = self._random.standard_normal((groups, dimension))
        tastes[1::2] = -tastes[0 : 2 * (groups // 2) : 2] + 0.3 * tastes[1::2]
        self._tastes = tastes / np.linalg.norm(tastes, axis=1, keepdims=True)

    def group_of(self, user_id: str) -> int:
        """The hidden group of a user."""
        return int(user_id.removeprefix("user-")) % len(self._tastes)

    def next_round(self) -> Round:
        """A random user and fresh arms."""
        user_id = f"user-{int(self._random.integers(self._users))}"
        arms = self._random.standard_normal((self._arms, self._tastes.shape[1]))
        arms /= np.linalg.norm(arms, axis=1, keepdims=True)
        squared = np.square(arms - self._tastes[self.group_of(user_id)]).sum(1)
        return Round(user_id, arms, self._low + (self._high - self._low) * np.exp(-squared / self._spread))

    def reward(self, asked: Round, arm: int) -> float:
        """1 with the arm's chance, otherwise 0."""
        return float(self._random.random() < asked.chances[arm])
