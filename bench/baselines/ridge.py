"""Ridge regressions, one row a user or a cluster, kept up to date by rank-one updates.

A row holds G = Σxxᵀ, b = Σ reward·x and, for the penalty P that all rows share, A⁻¹ = (P + G)⁻¹ and w = A⁻¹b. A sample
changes A⁻¹ by the Sherman-Morrison formula into A⁻¹ − (A⁻¹x)(A⁻¹x)ᵀ/(1 + xᵀA⁻¹x). Only a new penalty, or statistics
summed from other rows, need an inversion; it is delayed until the row is used.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from metaban.bench.baselines.base import Matrix

Places = NDArray[np.int64]


@final
class RidgeBank:
    """Statistics of some regressions under one penalty [D, D]; an input has D numbers, the intercept last."""

    def __init__(self, rows: int, penalty: Matrix) -> None:
        size = len(penalty)
        self.counts = np.zeros(rows, dtype=np.int64)  # [n]
        self.grams = np.zeros((rows, size, size))  # [n, D, D]
        self.targets = np.zeros((rows, size))  # [n, D]
        self._weights = np.zeros((rows, size))  # [n, D]
        self._inverses = np.zeros((rows, size, size))  # [n, D, D]
        self._stale = np.ones(rows, dtype=bool)  # [n]
        self._work = np.empty((size, size))  # [D, D]
        self.penalise(penalty)

    def penalise(self, penalty: Matrix) -> None:
        """Set the penalty P of all rows."""
        self.penalty = penalty
        self._stale[:] = True
        self._prior = np.linalg.inv(penalty)  # [D, D]

    def observe(self, row: int, inputs: Matrix, reward: float) -> None:
        """Learn one sample, inputs [D], in one row."""
        np.multiply.outer(inputs, inputs, out=self._work)
        self.grams[row] += self._work
        self.targets[row] += reward * inputs
        self.counts[row] += 1
        if self._stale[row]:
            return
        inverse = self._inverses[row]  # [D, D]
        gain = inverse @ inputs  # [D]
        shrunk = gain / (1.0 + inputs @ gain)  # [D]
        np.multiply.outer(gain, shrunk, out=self._work)
        inverse -= self._work
        # w' = w + A'⁻¹x·(reward − wᵀx), and A'⁻¹x is A⁻¹x/(1 + xᵀA⁻¹x).
        weights = self._weights[row]  # [D]
        weights += shrunk * (reward - weights @ inputs)

    def assign(self, row: int, members: Places, bank: RidgeBank) -> None:
        """Set a row to the sum of the given rows of a bank with the same penalty."""
        self.counts[row] = bank.counts[members].sum()
        self.grams[row] = bank.grams[members].sum(0)
        self.targets[row] = bank.targets[members].sum(0)
        self._stale[row] = True

    def weights(self, row: int) -> Matrix:
        """w of a row, [D]."""
        if self._stale[row]:
            self._solve(row)
        weights: Matrix = self._weights[row]
        return weights

    def all_weights(self) -> Matrix:
        """w of all rows, [n, D]."""
        self._solve_stale()
        return self._weights

    def all_inverses(self) -> Matrix:
        """A⁻¹ of all rows, [n, D, D]."""
        self._solve_stale()
        return self._inverses

    def bounds(self, row: int, inputs: Matrix, exploration: float) -> Matrix:
        """xᵀw + α·√(xᵀA⁻¹x) for each of the inputs [k, D] under one row, [k]."""
        if self._stale[row]:
            self._solve(row)
        variance = ((inputs @ self._inverses[row]) * inputs).sum(1)  # [k]
        bounds: Matrix = inputs @ self._weights[row] + exploration * np.sqrt(np.maximum(variance, 0.0))
        return bounds

    def bounds_of_all(self, rows: Places, inputs: Matrix, exploration: float) -> Matrix:
        """The same under each of the given rows, [r, k]."""
        self._solve_stale()
        variance = ((inputs @ self._inverses[rows]) * inputs).sum(-1)  # [r, k]
        bounds: Matrix = self._weights[rows] @ inputs.T + exploration * np.sqrt(np.maximum(variance, 0.0))
        return bounds

    def _solve(self, row: int) -> None:
        if self.counts[row]:
            self._inverses[row] = np.linalg.inv(self.penalty + self.grams[row])
        else:
            self._inverses[row] = self._prior
        self._weights[row] = self._inverses[row] @ self.targets[row]
        self._stale[row] = False

    def _solve_stale(self) -> None:
        if not self._stale.any():
            return
        rows = np.flatnonzero(self._stale)  # [s]
        self._inverses[rows] = self._prior
        seen = rows[self.counts[rows] > 0]
        if seen.size:
            self._inverses[seen] = np.linalg.inv(self.penalty + self.grams[seen])
        self._weights[rows] = (self._inverses[rows] @ self.targets[rows, :, None])[..., 0]
        self._stale[rows] = False
