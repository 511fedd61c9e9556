"""Shared by the linear baselines: intercept, standardised inputs, and random tie-breaking.

Methods that pool users' statistics invert matrices whenever clusters change, which is slow for wide inputs. They see
arms of more than `WIDEST_POOLED` numbers through a random projection with orthonormal columns.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final, Required, TypedDict

import numpy as np

from metaban.bench.baselines.base import Baseline, Matrix, best_row, with_intercept
from metaban.bench.baselines.standardizer import Standardizer

#: Widest arms that methods with pooled statistics take without projection.
WIDEST_POOLED: Final = 256


class LinearOptions(TypedDict, total=False):
    """Options of every linear method: λ, α, and raw or standardised inputs."""

    dimension: Required[int]
    regularization: float
    exploration: float
    standardize: bool
    seed: int


class LinearBaseline(Baseline):
    """Plays the arm of the highest upper bound; the method defines the bound."""

    def __init__(
        self,
        *,
        dimension: int,
        regularization: float = 1.0,
        exploration: float = 0.1,
        standardize: bool = False,
        seed: int = 0,
        widest: int | None = None,
    ) -> None:
        self.exploration = exploration
        self.random = np.random.default_rng(seed)
        self._projection: Matrix | None = None  # [d, widest]
        if widest is not None and dimension > widest:
            self._projection = np.linalg.qr(self.random.standard_normal((dimension, widest)))[0]
            dimension = widest
        self.standardizer = Standardizer(dimension, regularization, enabled=standardize)

    def choose(self, user: int, arms: Matrix) -> int:
        """The row of arms [k, d] with the highest bound."""
        if self._projection is not None:
            arms = arms @ self._projection  # [k, widest]
        if self.standardizer.observe(arms):
            self.penalise(self.standardizer.penalty)
        return best_row(self.bounds(user, with_intercept(arms)), self.random)

    def learn(self, user: int, arm: Matrix, reward: float) -> None:
        """Learn one sample of the played arm [d]."""
        if self._projection is not None:
            arm = arm @ self._projection  # [widest]
        self.observe(user, np.append(arm, 1.0), reward)

    @abstractmethod
    def bounds(self, user: int, inputs: Matrix) -> Matrix:
        """The upper bounds [k] of the inputs [k, D]."""

    @abstractmethod
    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """Learn a sample, inputs [D]."""

    @abstractmethod
    def penalise(self, penalty: Matrix) -> None:
        """Use another ridge penalty [D, D] from now on."""
