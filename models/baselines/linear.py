"""What the linear baselines share: intercept, standardised inputs, and a tie broken by chance.

Methods that pool users' statistics invert matrices whenever clusters change, which is dear when inputs are wide. They
see arms of more than `WIDEST_POOLED` numbers through a random projection with orthonormal columns.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final, Required, TypedDict

import numpy as np

from models.baselines.base import Baseline, Matrix, best_row, with_intercept
from models.baselines.standardizer import Standardizer

#: Numbers of an arm that methods with pooled statistics take as they are.
WIDEST_POOLED: Final = 256


class LinearOptions(TypedDict, total=False):
    """What every linear method is built with; λ, α and inputs as they are or standardised."""

    dimension: Required[int]
    regularization: float
    exploration: float
    standardize: bool
    seed: int


class LinearBaseline(Baseline):
    """Plays the arm of the highest upper bound; what the bound is made of is up to the method."""

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
        """One sample more, of the arm [d] that was played."""
        if self._projection is not None:
            arm = arm @ self._projection  # [widest]
        self.observe(user, np.append(arm, 1.0), reward)

    @abstractmethod
    def bounds(self, user: int, inputs: Matrix) -> Matrix:
        """The upper bounds [k] of the inputs [k, D]."""

    @abstractmethod
    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """Take in a sample, inputs [D]."""

    @abstractmethod
    def penalise(self, penalty: Matrix) -> None:
        """Use another ridge penalty [D, D] from now on."""
