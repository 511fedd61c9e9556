"""LOCB: Ban and He, Local clustering in contextual multi-armed bandits, WWW 2021.

A few users, drawn once, are seeds. The local cluster of seed s has the users j with

    ‖w_s − w_j‖ ≤ max(γ, α₂·(F(T_s) + F(T_j))),        F(T) = √((1 + ln(1 + T))/(1 + T)),

so every user is a member until told apart, and users within the radius γ remain. Clusters overlap, and members change
as estimates move. An arm's bound is the highest one among the clusters of the user, each LinUCB on the samples of all
members; a user in no cluster is scored alone.
"""

from __future__ import annotations

from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from metaban.bench.baselines.base import Matrix
from metaban.bench.baselines.linear import WIDEST_POOLED, LinearBaseline, LinearOptions
from metaban.bench.baselines.partition import confidence_width
from metaban.bench.baselines.ridge import RidgeBank

#: Number of seeds, the authors' default.
SEEDS = 20

#: γ: users whose weights are this close to a seed's always belong to it.
RADIUS = 0.2


@final
class Locb(LinearBaseline):
    """Overlapping clusters around seeds; the cluster with the highest bound decides."""

    def __init__(
        self,
        *,
        users: int,
        separation: float = 0.4,
        seeds: int = SEEDS,
        radius: float = RADIUS,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(widest=WIDEST_POOLED, **options)
        self._separation = separation
        self._radius = radius
        self.users = RidgeBank(users, self.standardizer.penalty)
        self.seeds = np.sort(self.random.choice(users, size=min(seeds, users), replace=False))  # [s]
        self.clusters = RidgeBank(len(self.seeds), self.standardizer.penalty)
        self.members = np.ones((len(self.seeds), users), dtype=bool)  # [s, n]

    def bounds(self, user: int, inputs: Matrix) -> Matrix:
        """The highest of LinUCB's bounds on the samples of the user's clusters, [k]."""
        clusters = np.flatnonzero(self.members[:, user])  # [c]
        if not clusters.size:
            return self.users.bounds(user, inputs, self.exploration)
        if clusters.size == 1:
            return self.clusters.bounds(int(clusters[0]), inputs, self.exploration)
        bounds: Matrix = self.clusters.bounds_of_all(clusters, inputs, self.exploration).max(0)
        return bounds

    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """Learn and update the clusters of the user; for a seed, update all members."""
        self.users.observe(user, inputs, reward)
        for cluster in np.flatnonzero(self.members[:, user]):
            self.clusters.observe(int(cluster), inputs, reward)
        near = self._near(user)  # [n]
        changed = self.members[:, user] != near[self.seeds]  # [s]
        self.members[:, user] = near[self.seeds]
        own = self.seeds == user  # [s]
        changed |= own & (self.members != near).any(1)
        self.members[own] = near
        for cluster in np.flatnonzero(changed):
            self.clusters.assign(int(cluster), np.flatnonzero(self.members[cluster]), self.users)

    def penalise(self, penalty: Matrix) -> None:
        """Set the penalty; each model is solved again when it is next used."""
        self.users.penalise(penalty)
        self.clusters.penalise(penalty)

    def _near(self, user: int) -> NDArray[np.bool_]:
        """Users whose estimates cannot be told from this user's, [n]."""
        weights = self.standardizer.standard_weights(self.users.all_weights())  # [n, D]
        widths = confidence_width(self.users.counts)  # [n]
        gaps = np.linalg.norm(weights - weights[user], axis=1)  # [n]
        near: NDArray[np.bool_] = gaps <= np.maximum(self._radius, self._separation * (widths + widths[user]))
        return near
