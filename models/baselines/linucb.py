"""LinUCB: Li, Chu, Langford and Schapire, A contextual-bandit approach to personalized news recommendation, WWW 2010.

An arm's bound is xᵀw + α·√(xᵀA⁻¹x) with A = λI + Σxxᵀ and w = A⁻¹Σrx, over the samples of all users (shared) or of the
user who asks (one model a user).
"""

from __future__ import annotations

from typing import final

from models.baselines.base import Matrix
from models.baselines.linear import LinearBaseline
from models.baselines.ridge import RidgeBank


@final
class LinUCB(LinearBaseline):
    """Ridge regression with the exact confidence bonus, one for everybody or one a user."""

    def __init__(
        self,
        *,
        users: int,
        dimension: int,
        regularization: float = 1.0,
        exploration: float = 0.1,
        standardize: bool = False,
        seed: int = 0,
        shared: bool = True,
    ) -> None:
        super().__init__(
            dimension=dimension,
            regularization=regularization,
            exploration=exploration,
            standardize=standardize,
            seed=seed,
        )
        self._shared = shared
        self.bank = RidgeBank(1 if shared else users, self.standardizer.penalty)

    def bounds(self, user: int, inputs: Matrix) -> Matrix:
        """xᵀw + α·√(xᵀA⁻¹x), [k]."""
        return self.bank.bounds(0 if self._shared else user, inputs, self.exploration)

    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """One rank-one update."""
        self.bank.observe(0 if self._shared else user, inputs, reward)

    def penalise(self, penalty: Matrix) -> None:
        """Every model is solved anew when it is next asked."""
        self.bank.penalise(penalty)
