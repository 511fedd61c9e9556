"""LinUCB: Li, Chu, Langford and Schapire, A contextual-bandit approach to personalized news recommendation, WWW 2010.

An arm's bound is xᵀw + α·√(xᵀA⁻¹x) with A = λI + Σxxᵀ and w = A⁻¹Σrx, over the samples of all users (shared) or of the
asking user (one model a user).
"""

from __future__ import annotations

from typing import Unpack, final

from metaban.bench.baselines.base import Matrix
from metaban.bench.baselines.linear import LinearBaseline, LinearOptions
from metaban.bench.baselines.ridge import RidgeBank


@final
class LinUCB(LinearBaseline):
    """Ridge regression with the exact confidence bonus, one for all users or one a user."""

    def __init__(self, *, users: int, shared: bool = True, **options: Unpack[LinearOptions]) -> None:
        super().__init__(**options)
        self._shared = shared
        self.bank = RidgeBank(1 if shared else users, self.standardizer.penalty)

    def bounds(self, user: int, inputs: Matrix) -> Matrix:
        """xᵀw + α·√(xᵀA⁻¹x), [k]."""
        return self.bank.bounds(0 if self._shared else user, inputs, self.exploration)

    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """One rank-one update."""
        self.bank.observe(0 if self._shared else user, inputs, reward)

    def penalise(self, penalty: Matrix) -> None:
        """Set the penalty; each model is solved again when it is next used."""
        self.bank.penalise(penalty)
