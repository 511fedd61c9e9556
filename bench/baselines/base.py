"""The interface of baselines: choose an arm for a user, and learn its reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

#: Scores closer than this are equal: rewards are of the order of 1, and equal arms differ by rounding.
TIE: Final = 1e-6


class Baseline(ABC):
    """A contextual bandit over users 0 … n−1; an arm is its features, without an id or a position."""

    @abstractmethod
    def choose(self, user: int, arms: Matrix) -> int:
        """The row of arms [k, d] to play for this user."""

    @abstractmethod
    def learn(self, user: int, arm: Matrix, reward: float) -> None:
        """Learn the reward of the arm [d] that was played for this user."""


def with_intercept(rows: Matrix) -> Matrix:
    """Rows [k, d] with a constant 1 appended to each, [k, d + 1]."""
    inputs = np.ones((rows.shape[0], rows.shape[1] + 1))  # [k, d + 1]
    inputs[:, :-1] = rows
    return inputs


def best_row(scores: Matrix, random: np.random.Generator) -> int:
    """The index of the highest score; ties are broken at random, so that position does not matter."""
    best = int(scores.argmax())
    ties = np.flatnonzero(scores >= scores[best] - TIE)
    return best if ties.size < 2 else int(random.choice(ties))
