"""Users in disjoint clusters with the pooled statistics of each: shared by CLUB and SCLUB."""

from __future__ import annotations

from typing import final

import numpy as np

from metaban.bench.baselines.base import Matrix
from metaban.bench.baselines.ridge import Places, RidgeBank


def confidence_width(counts: Places) -> Matrix:
    """F(T) = √((1 + ln(1 + T))/(1 + T)): up to a factor, the error of an estimate from T samples."""
    samples = 1.0 + counts
    width: Matrix = np.sqrt((1.0 + np.log(samples)) / samples)
    return width


@final
class UserClusters:
    """One bank row a user, one a cluster; a cluster's row is always the sum of its members' rows."""

    def __init__(self, users: int, penalty: Matrix) -> None:
        self.users = RidgeBank(users, penalty)
        self.clusters = RidgeBank(users, penalty)
        self.labels = np.zeros(users, dtype=np.int64)  # [n], the cluster's row of each user
        self._free = list(range(users - 1, 0, -1))

    def members(self, label: int) -> Places:
        """The users of a cluster."""
        return np.flatnonzero(self.labels == label)

    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """Learn one sample, inputs [D], in the rows of the user and of the cluster."""
        self.users.observe(user, inputs, reward)
        self.clusters.observe(int(self.labels[user]), inputs, reward)

    def penalise(self, penalty: Matrix) -> None:
        """Set the penalty [D, D]."""
        self.users.penalise(penalty)
        self.clusters.penalise(penalty)

    def separate(self, parting: Places) -> int:
        """Move some, but not all, members of one cluster into a new cluster; returns its label."""
        old, new = int(self.labels[parting[0]]), self._free.pop()
        self.labels[parting] = new
        self.clusters.assign(new, parting, self.users)
        self.clusters.assign(old, self.members(old), self.users)
        return new

    def merge(self, kept: int, dissolved: int) -> None:
        """Move all members of one cluster into another."""
        self.labels[self.labels == dissolved] = kept
        self.clusters.assign(kept, np.array([kept, dissolved]), self.clusters)
        self.clusters.assign(dissolved, np.zeros(0, dtype=np.int64), self.users)
        self._free.append(dissolved)
