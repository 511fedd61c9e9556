"""CLUB: Gentile, Li and Zappella, Online clustering of bandits, ICML 2014.

Users are the nodes of a graph. After an update of user i, the edge to j is removed for good when

    ‖w_i − w_j‖ > α₂·(F(T_i) + F(T_j)),        F(T) = √((1 + ln(1 + T))/(1 + T)),

and the connected components are the clusters: an arm is scored by LinUCB on the samples of the whole component.
"""

from __future__ import annotations

from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from metaban.bench.baselines.base import Matrix
from metaban.bench.baselines.linear import WIDEST_POOLED, LinearBaseline, LinearOptions
from metaban.bench.baselines.partition import UserClusters, confidence_width
from metaban.bench.baselines.ridge import Places

#: The initial graph joins two users with chance EDGE_FACTOR·ln(n)/n, enough to be connected almost surely.
EDGE_FACTOR = 3.0


@final
class Club(LinearBaseline):
    """Users in a connected component of the graph share their statistics; edges are only removed."""

    def __init__(
        self, *, users: int, separation: float = 0.4, edge_factor: float = EDGE_FACTOR, **options: Unpack[LinearOptions]
    ) -> None:
        super().__init__(widest=WIDEST_POOLED, **options)
        self._separation = separation
        self.partition = UserClusters(users, self.standardizer.penalty)
        chance = min(1.0, edge_factor * np.log(max(users, 2)) / users)
        self.edges = np.triu(self.random.random((users, users)) < chance, 1)  # [n, n]
        self.edges |= self.edges.T
        self._split(np.arange(users))

    def bounds(self, user: int, inputs: Matrix) -> Matrix:
        """LinUCB's bound on the samples of the user's component, [k]."""
        return self.partition.clusters.bounds(int(self.partition.labels[user]), inputs, self.exploration)

    def observe(self, user: int, inputs: Matrix, reward: float) -> None:
        """Learn, remove edges that no longer hold, and split the component if it is no longer connected."""
        self.partition.observe(user, inputs, reward)
        neighbours = np.flatnonzero(self.edges[user])  # [e]
        if not neighbours.size:
            return
        weights = self.standardizer.standard_weights(self.partition.users.all_weights())  # [n, D]
        gaps = np.linalg.norm(weights[neighbours] - weights[user], axis=1)  # [e]
        widths = confidence_width(self.partition.users.counts)  # [n]
        parting = neighbours[gaps > self._separation * (widths[neighbours] + widths[user])]
        if parting.size:
            self.edges[user, parting] = self.edges[parting, user] = False
            self._split(self.partition.members(int(self.partition.labels[user])))

    def penalise(self, penalty: Matrix) -> None:
        """Set the penalty; each model is solved again when it is next used."""
        self.partition.penalise(penalty)

    def _split(self, members: Places) -> None:
        for component in components(self.edges, members)[1:]:
            self.partition.separate(component)


def components(edges: NDArray[np.bool_], members: Places) -> list[Places]:
    """Connected components of the graph [n, n] among members that have no edges to others."""
    waiting = np.zeros(len(edges), dtype=bool)  # [n]
    waiting[members] = True
    found: list[Places] = []
    while waiting.any():
        reached = np.zeros_like(waiting)  # [n]
        front = np.array([waiting.argmax()])
        while front.size:
            reached[front] = True
            front = np.flatnonzero(edges[front].any(0) & ~reached)
        waiting &= ~reached
        found.append(np.flatnonzero(reached))
    return found
