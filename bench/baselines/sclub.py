"""SCLUB: Li, Chen, Li and Leung, Improved algorithm on online clustering of bandits, IJCAI 2019.

Clusters are sets that split and merge, in phases of 1, 2, 4, … rounds. A phase keeps each cluster's estimate w_V and
its number of samples T_V from its beginning. After an update of user i, with F as in `confidence_width`,

    split: i moves to a new cluster when ‖w_i − w_V‖ > α₂·(F(T_i) + F(T_V)) against the kept values of V;
    merge: two clusters whose users have all been served in this phase merge when
           ‖w_V − w_V'‖ < α₂/2·(F(T_V) + F(T_V')).
"""

from __future__ import annotations

from typing import Unpack, final

import numpy as np

from metaban.bench.baselines.base import Matrix
from metaban.bench.baselines.linear import WIDEST_POOLED, LinearBaseline, LinearOptions
from metaban.bench.baselines.partition import UserClusters, confidence_width


@final
class Sclub(LinearBaseline):
    """Set-based clusters that split and merge."""

    def __init__(self, *, users: int, separation: float = 0.4, **options: Unpack[LinearOptions]) -> None:
        super().__init__(widest=WIDEST_POOLED, **options)
        self._separation = separation
        self.partition = UserClusters(users, self.standardizer.penalty)
        self._served = np.zeros(users, dtype=bool)  # [n], in this phase
        self._rounds = 0
        self._phase_end = 1
        self._remember()

    def bounds(self, user: int, inputs: Matrix) -> Matrix:
        """LinUCB's bound on the samples of the user's cluster, [k]."""
        return self.partition.clusters.bounds(int(self.partition.labels[user]), inputs, self.exploration)

    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """Learn, split or merge the user's cluster, and begin a new phase when it is due."""
        self.partition.observe(user, inputs, reward)
        self._served[user] = True
        self._split(user)
        self._merge(int(self.partition.labels[user]))
        self._rounds += 1
        if self._rounds == self._phase_end:
            self._phase_end = 2 * self._phase_end + 1
            self._served[:] = False
            self._remember()

    def penalise(self, penalty: Matrix) -> None:
        """Set the penalty; each model is solved again when it is next used."""
        self.partition.penalise(penalty)

    def _remember(self) -> None:
        labels = self.partition.labels
        self._past_weights = self.partition.clusters.all_weights()[labels]  # [n, D], of each user's cluster
        self._past_widths = confidence_width(self.partition.clusters.counts)[labels]  # [n]

    def _split(self, user: int) -> None:
        partition = self.partition
        if np.count_nonzero(partition.labels == partition.labels[user]) < 2:
            return
        own = self.standardizer.standard_weights(partition.users.weights(user))  # [D]
        past = self.standardizer.standard_weights(self._past_weights[user])  # [D]
        width = confidence_width(partition.users.counts[user]) + self._past_widths[user]
        if np.linalg.norm(own - past) > self._separation * width:
            partition.separate(np.array([user]))

    def _merge(self, label: int) -> None:
        partition = self.partition
        unserved = np.bincount(partition.labels[~self._served], minlength=len(partition.labels))  # [clusters]
        if unserved[label]:
            return
        alive = np.bincount(partition.labels, minlength=len(partition.labels)) > 0  # [clusters]
        others = np.flatnonzero(alive & (unserved == 0))
        others = others[others != label]
        if not others.size:
            return
        rows = np.append(others, label)  # [o + 1]
        weights = np.stack([partition.clusters.weights(int(row)) for row in rows])
        standard = self.standardizer.standard_weights(weights)  # [o + 1, D]
        widths = confidence_width(partition.clusters.counts[rows])  # [o + 1]
        gaps = np.linalg.norm(standard[:-1] - standard[-1], axis=1)  # [o]
        excess = gaps - 0.5 * self._separation * (widths[:-1] + widths[-1])  # [o]
        nearest = int(excess.argmin())
        if excess[nearest] < 0:
            partition.merge(label, int(others[nearest]))
