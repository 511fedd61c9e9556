"""CLUB, SCLUB, COFIBA and LOCB, recomputed from all samples at every step: slow and easy to compare with the papers.

Inputs are standardised one by one, every regression is solved from scratch, and graphs are plain sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from metaban.bench.baselines.standardizer import Standardizer
from tests.bench.baselines.linear_worlds import Matrix

Fit = tuple[Matrix, Matrix]


def width(samples: int) -> float:
    """F(T)."""
    return float(np.sqrt((1 + np.log(1 + samples)) / (1 + samples)))


class SlowBandit(ABC):
    """All samples of all users, and the ridge regressions on any of them."""

    def __init__(self, users: int, standardizer: Standardizer, penalty: float, exploration: float, separation: float):
        self.users = users
        self.standardizer = standardizer
        self.penalty = penalty
        self.exploration = exploration
        self.separation = separation
        self.samples: list[list[tuple[Matrix, float]]] = [[] for _ in range(users)]
        self._fits: dict[tuple[frozenset[int], bytes], Fit] = {}

    def inputs(self, arm: Matrix) -> Matrix:
        """An arm [d], standardised, and 1."""
        return np.append((arm - self.standardizer.mean) / self.standardizer.deviation, 1.0)

    def fit(self, users: Iterable[int]) -> Fit:
        """A⁻¹ and w of some users together; cached until the next sample or scale."""
        users = frozenset(users)
        key = users, self.standardizer.deviation.tobytes()
        if key not in self._fits:
            self._fits[key] = self._solve(users)
        return self._fits[key]

    def _solve(self, users: frozenset[int]) -> Fit:
        size = len(self.standardizer.mean) + 1
        a, b = self.penalty * np.eye(size), np.zeros(size)
        for user in users:
            for arm, reward in self.samples[user]:
                x = self.inputs(arm)
                a += np.outer(x, x)
                b += reward * x
        inverse = np.linalg.inv(a)
        return inverse, inverse @ b

    def estimate(self, users: Iterable[int]) -> Matrix:
        """w of some users together."""
        return self.fit(users)[1]

    def count(self, users: Iterable[int]) -> int:
        """Samples of some users together."""
        return sum(len(self.samples[user]) for user in users)

    def bound(self, users: Iterable[int], arm: Matrix) -> float:
        """LinUCB's bound of one arm on the samples of some users."""
        inverse, weights = self.fit(users)
        x = self.inputs(arm)
        return float(x @ weights + self.exploration * np.sqrt(x @ inverse @ x))

    def told_apart(self, one: int, other: int) -> bool:
        """Whether two users' estimates are further apart than their confidence widths."""
        gap = np.linalg.norm(self.estimate([one]) - self.estimate([other]))
        return bool(gap > self.separation * (width(self.count([one])) + width(self.count([other]))))

    def learn(self, user: int, arm: Matrix, reward: float) -> None:
        """Keep a sample and update the clusters."""
        self.samples[user].append((arm, reward))
        self._fits.clear()
        self.regroup(user)

    @abstractmethod
    def bounds(self, user: int, arms: Matrix) -> Matrix:
        """The bound of each arm."""

    @abstractmethod
    def regroup(self, user: int) -> None:
        """Update the clusters after a sample of this user."""


class SlowClub(SlowBandit):
    """Edges are pairs; components are searched at every call."""

    edges: set[frozenset[int]]

    def cluster(self, user: int) -> set[int]:
        """The component of a user."""
        found, grown = {user}, True
        while grown:
            more = found.union(*[edge for edge in self.edges if edge & found])
            grown = more != found
            found = more
        return found

    def bounds(self, user: int, arms: Matrix) -> Matrix:
        return np.array([self.bound(self.cluster(user), arm) for arm in arms])

    def regroup(self, user: int) -> None:
        for edge in list(self.edges):
            if user in edge and self.told_apart(*edge):
                self.edges.remove(edge)


class SlowSclub(SlowBandit):
    """Clusters are sets; a phase has its own copy of them."""

    def start(self) -> None:
        """One cluster of all, and the first phase, of one round."""
        self.clusters = [set(range(self.users))]
        self.rounds, self.phase = 0, 1
        self.remember()

    def remember(self) -> None:
        """Begin a phase."""
        self.served: set[int] = set()
        self.left = self.phase
        # Samples of the clusters, so that estimates can be recomputed under other moments.
        self.past = {user: self.fit_of_now(self.cluster(user)) for user in range(self.users)}

    def fit_of_now(self, cluster: set[int]) -> tuple[Matrix, int]:
        """A cluster's estimate in raw coordinates and its number of samples."""
        return self.raw(self.estimate(cluster)), self.count(cluster)

    def raw(self, weights: Matrix) -> Matrix:
        """Weights of raw inputs."""
        features = weights[:-1] / self.standardizer.deviation
        return np.append(features, weights[-1] - features @ self.standardizer.mean)

    def cluster(self, user: int) -> set[int]:
        """The cluster a user is in."""
        return next(cluster for cluster in self.clusters if user in cluster)

    def bounds(self, user: int, arms: Matrix) -> Matrix:
        return np.array([self.bound(self.cluster(user), arm) for arm in arms])

    def regroup(self, user: int) -> None:
        self.served.add(user)
        cluster = self.cluster(user)
        past, samples = self.past[user]
        gap = np.linalg.norm(self.estimate([user]) - self.standardizer.standard_weights(past))
        if len(cluster) > 1 and gap > self.separation * (width(self.count([user])) + width(samples)):
            cluster.remove(user)
            cluster = {user}
            self.clusters.append(cluster)
        self.unite(cluster)
        self.left -= 1
        if self.left == 0:
            self.phase *= 2
            self.remember()

    def unite(self, cluster: set[int]) -> None:
        """Merge with the cluster nearest relative to the widths, if it is near enough."""
        if not cluster <= self.served:
            return
        near = []
        for other in self.clusters:
            if other is not cluster and other <= self.served:
                gap = np.linalg.norm(self.estimate(cluster) - self.estimate(other))
                reach = self.separation / 2 * (width(self.count(cluster)) + width(self.count(other)))
                near.append((gap - reach, other))
        if near and min(near, key=lambda pair: pair[0])[0] < 0:
            other = min(near, key=lambda pair: pair[0])[1]
            self.clusters.remove(other)
            cluster |= other


class SlowCofiba(SlowBandit):
    """Neighbourhoods, arm by arm and user by user."""

    def agree(self, one: int, other: int, arm: Matrix) -> bool:
        """Whether two users cannot be told apart by their predictions for an arm."""
        x, rounds = self.inputs(arm), self.count(range(self.users))
        inverses, weights = zip(*[self.fit([one]), self.fit([other])], strict=True)
        reach = sum(np.sqrt(x @ inverse @ x * np.log(1 + rounds)) for inverse in inverses)
        return bool(abs(x @ weights[0] - x @ weights[1]) <= self.separation * reach)

    def neighbours(self, user: int, arm: Matrix) -> set[int]:
        """Users who agree with a user on an arm."""
        return {other for other in range(self.users) if self.agree(user, other, arm)}

    def bounds(self, user: int, arms: Matrix) -> Matrix:
        return np.array([self.bound(self.neighbours(user, arm), arm) for arm in arms])

    def regroup(self, user: int) -> None:
        pass


class SlowLocb(SlowBandit):
    """Clusters around seeds; a user's membership changes only when that user or the seed learns."""

    seeds: list[int]
    radius: float

    def start(self) -> None:
        """Every user is in every cluster."""
        self.clusters = {seed: set(range(self.users)) for seed in self.seeds}

    def near(self, one: int, other: int) -> bool:
        """Whether two users are within the radius, or not told apart yet."""
        gap = np.linalg.norm(self.estimate([one]) - self.estimate([other]))
        return bool(gap <= self.radius) or not self.told_apart(one, other)

    def bounds(self, user: int, arms: Matrix) -> Matrix:
        groups = [cluster for cluster in self.clusters.values() if user in cluster] or [{user}]
        return np.array([max(self.bound(group, arm) for group in groups) for arm in arms])

    def regroup(self, user: int) -> None:
        for seed, cluster in self.clusters.items():
            for other in range(self.users) if seed == user else [user]:
                if self.near(seed, other):
                    cluster.add(other)
                else:
                    cluster.discard(other)
