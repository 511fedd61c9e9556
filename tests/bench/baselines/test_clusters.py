"""The clustering baselines against slow versions, round by round, with users in two groups."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from metaban.bench.baselines.base import with_intercept
from metaban.bench.baselines.club import Club, components
from metaban.bench.baselines.cofiba import Cofiba
from metaban.bench.baselines.linear import LinearBaseline
from metaban.bench.baselines.locb import Locb
from metaban.bench.baselines.partition import UserClusters
from metaban.bench.baselines.sclub import Sclub
from tests.bench.baselines.linear_worlds import LinearWorld
from tests.bench.baselines.slow_clusters import SlowBandit, SlowClub, SlowCofiba, SlowLocb, SlowSclub

USERS, DIMENSION, ROUNDS = 7, 2, 90
PENALTY, EXPLORATION = 0.5, 0.3
#: Confidence widths small enough to split users and, in SCLUB, to merge clusters; COFIBA's widths differ.
SEPARATION, SEPARATION_OF_SETS, SEPARATION_OF_PREDICTIONS = 0.2, 0.15, 0.05


def common(standardize: bool, **more: Any) -> dict[str, Any]:
    """Settings of the fast implementation."""
    return {
        "users": USERS,
        "dimension": DIMENSION,
        "regularization": PENALTY,
        "exploration": EXPLORATION,
        "separation": SEPARATION,
        "standardize": standardize,
        "seed": 3,
        **more,
    }


def slow_version(kind: type[Any], fast: LinearBaseline, separation: float = SEPARATION) -> Any:
    """The slow implementation, with the same moments."""
    return kind(USERS, fast.standardizer, PENALTY, EXPLORATION, separation)


def compare(fast: LinearBaseline, slow: SlowBandit, look: Any) -> list[Any]:
    """Run both; `look` gives the clusters of each, which must be equal. Returns all clusterings in order."""
    world = LinearWorld(seed=4, tastes=2, users=USERS, dimension=DIMENSION, variety=0.5)
    met: list[Any] = []
    for _ in range(ROUNDS):
        user, arms, worth = world.next_round()
        arms = arms[:4]
        choice = fast.choose(user, arms)
        expected = slow.bounds(user, arms)
        assert fast.bounds(user, with_intercept(arms)) == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert choice == expected.argmax()
        reward = world.reward(worth[choice])
        fast.learn(user, arms[choice], reward)
        slow.learn(user, arms[choice], reward)
        ours, theirs = look()
        assert ours == theirs
        if ours not in met[-1:]:
            met.append(ours)
    return met


def clusters_of(partition: UserClusters) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(partition.members(label).tolist()) for label in set(partition.labels.tolist()))


@pytest.mark.parametrize("standardize", [False, True])
def test_club(standardize: bool) -> None:
    fast = Club(**common(standardize))
    slow: SlowClub = slow_version(SlowClub, fast)
    slow.edges = {frozenset((int(i), int(j))) for i, j in np.argwhere(fast.edges)}
    met = compare(
        fast, slow, lambda: (clusters_of(fast.partition), frozenset(frozenset(slow.cluster(i)) for i in range(USERS)))
    )
    assert len(met) > 2


@pytest.mark.parametrize("standardize", [False, True])
def test_sclub(standardize: bool) -> None:
    fast = Sclub(**common(standardize, separation=SEPARATION_OF_SETS))
    slow: SlowSclub = slow_version(SlowSclub, fast, SEPARATION_OF_SETS)
    slow.start()
    met = compare(fast, slow, lambda: (clusters_of(fast.partition), frozenset(map(frozenset, slow.clusters))))
    steps = [len(after) - len(before) for before, after in pairwise(met)]
    assert max(steps) > 0 > min(steps)  # clusters split, and merged


@pytest.mark.parametrize("standardize", [False, True])
def test_cofiba(standardize: bool) -> None:
    fast = Cofiba(**common(standardize, separation=SEPARATION_OF_PREDICTIONS))
    slow: SlowCofiba = slow_version(SlowCofiba, fast, SEPARATION_OF_PREDICTIONS)
    probes = np.random.default_rng(5).standard_normal((3, DIMENSION))

    def look() -> tuple[Any, Any]:
        ours = fast.neighbours(1, with_intercept(probes))
        theirs = [slow.neighbours(1, probe) for probe in probes]
        return tuple(frozenset(np.flatnonzero(row).tolist()) for row in ours), tuple(map(frozenset, theirs))

    assert len(compare(fast, slow, look)) > 4


@pytest.mark.parametrize("standardize", [False, True])
def test_locb(standardize: bool) -> None:
    fast = Locb(**common(standardize, seeds=3, radius=0.1))
    slow: SlowLocb = slow_version(SlowLocb, fast)
    slow.seeds, slow.radius = fast.seeds.tolist(), 0.1
    slow.start()

    def look() -> tuple[Any, Any]:
        ours = tuple(frozenset(np.flatnonzero(row).tolist()) for row in fast.members)
        return ours, tuple(frozenset(slow.clusters[seed]) for seed in slow.seeds)

    assert len(compare(fast, slow, look)) > 4


def test_components() -> None:
    edges = np.zeros((6, 6), dtype=bool)
    for i, j in ((0, 3), (3, 5), (1, 2)):
        edges[i, j] = edges[j, i] = True
    assert [part.tolist() for part in components(edges, np.arange(6))] == [[0, 3, 5], [1, 2], [4]]
    assert [part.tolist() for part in components(edges, np.array([1, 2]))] == [[1, 2]]


def test_a_partition_can_split_into_single_users_and_merge_again() -> None:
    partition = UserClusters(4, np.eye(3))
    random = np.random.default_rng(6)
    for user in range(4):
        partition.observe(user, random.standard_normal(3), 1.0)
    whole = partition.clusters.weights(0).copy()
    for _ in range(3):
        for user in range(1, 4):
            partition.separate(np.array([user]))
        assert len(set(partition.labels.tolist())) == 4
        for user in range(4):
            assert partition.clusters.weights(int(partition.labels[user])) == pytest.approx(
                partition.users.weights(user)
            )
        for user in range(1, 4):
            partition.merge(int(partition.labels[0]), int(partition.labels[user]))
        assert partition.clusters.weights(int(partition.labels[0])) == pytest.approx(whole)
        assert partition.clusters.counts.tolist() == [4, 0, 0, 0]
