"""COFIBA: Li, Karatzoglou and Gentile, Collaborative filtering bandits, SIGIR 2016.

Similarity of users depends on the item. For an arm x, the neighbours of user i are the users j with

    |w_iᵀx − w_jᵀx| ≤ CB_i(x) + CB_j(x),        CB_j(x) = α₂·√(xᵀA_j⁻¹x · ln(1 + t)),

and the arm is scored by LinUCB on the samples of all its neighbours. Items have no ids here, so neighbourhoods are
computed for the arms of every slate instead of being kept in one user graph per item cluster.
"""

from __future__ import annotations

from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from metaban.bench.baselines.base import Matrix
from metaban.bench.baselines.linear import WIDEST_POOLED, LinearBaseline, LinearOptions
from metaban.bench.baselines.ridge import RidgeBank


@final
class Cofiba(LinearBaseline):
    """LinUCB on the samples of the users who agree on the arm."""

    def __init__(self, *, users: int, separation: float = 0.1, **options: Unpack[LinearOptions]) -> None:
        super().__init__(widest=WIDEST_POOLED, **options)
        self._separation = separation
        self._rounds = 0
        self.bank = RidgeBank(users, self.standardizer.penalty)

    def neighbours(self, user: int, inputs: Matrix) -> NDArray[np.bool_]:
        """Which users agree with the user on each of the inputs [k, D]: [k, n]."""
        inverses, weights = self.bank.all_inverses(), self.bank.all_weights()
        variances = ((inputs @ inverses) * inputs).sum(-1).T  # [k, n]
        widths = np.sqrt(np.maximum(variances, 0.0))  # [k, n]
        means = inputs @ weights.T  # [k, n]
        reach = self._separation * np.sqrt(np.log1p(self._rounds)) * (widths + widths[:, [user]])  # [k, n]
        near: NDArray[np.bool_] = np.abs(means - means[:, [user]]) <= reach
        return near

    def bounds(self, user: int, inputs: Matrix) -> Matrix:
        """LinUCB's bound on the samples of each arm's neighbourhood, [k]."""
        near = self.neighbours(user, inputs)  # [k, n]
        pooled = near.sum(1) > 1  # [k]
        if pooled.all():
            return self._pooled_bounds(near, inputs)
        bounds = self.bank.bounds(user, inputs, self.exploration)  # [k], final where the user has no neighbours
        if pooled.any():
            bounds[pooled] = self._pooled_bounds(near[pooled], inputs[pooled])
        return bounds

    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """One rank-one update of the user."""
        self._rounds += 1
        self.bank.observe(user, inputs, reward)

    def penalise(self, penalty: Matrix) -> None:
        """Set the penalty; each model is solved again when it is next used."""
        self.bank.penalise(penalty)

    def _pooled_bounds(self, near: NDArray[np.bool_], inputs: Matrix) -> Matrix:
        """Bounds [k] of inputs [k, D], each on the samples of the users marked in its row of near [k, n]."""
        bank = self.bank
        users, size = bank.targets.shape
        share = near.astype(np.float64)  # [k, n]
        systems = (share @ bank.grams.reshape(users, -1)).reshape(-1, size, size) + bank.penalty  # [k, D, D]
        # A(w, v) = (b, x) gives the weights and the bonus √(xᵀv) in one solution.
        right = np.stack([share @ bank.targets, inputs], axis=-1)  # [k, D, 2]
        solved = (inputs[:, :, None] * np.linalg.solve(systems, right)).sum(1)  # [k, 2]
        bounds: Matrix = solved[:, 0] + self.exploration * np.sqrt(np.maximum(solved[:, 1], 0.0))
        return bounds
