"""Leases of partitions: one holder each, free again when not renewed; shares are even and complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from metaban.store.keys import NamespaceKeys
from metaban.store.shared.partition_leases import PartitionLeases, Share

PARTITIONS = 5

Lease = Callable[..., PartitionLeases]


@pytest.fixture
def lease(redis: Redis) -> Lease:
    """Leases of a worker in a namespace of PARTITIONS partitions."""

    def make(token: str, *, ttl_ms: int = 60_000, partitions: int = PARTITIONS) -> PartitionLeases:
        return PartitionLeases(redis, NamespaceKeys("leases", partitions), token, ttl_ms=ttl_ms)

    return make


async def test_a_single_worker_has_all_partitions(lease: Lease) -> None:
    assert await lease("one").renew() == Share(("one",), frozenset(range(PARTITIONS)))


async def test_a_partition_is_handed_over_when_it_is_no_longer_used(lease: Lease) -> None:
    one, two = lease("one"), lease("two")
    await one.renew()
    assert await two.renew() == Share(("one", "two"), frozenset())
    assert (await one.renew(in_use=range(PARTITIONS))).partitions == {0, 2, 4}
    assert (await two.renew()).partitions == frozenset(), "still in use"
    assert (await one.renew(in_use=[0, 2, 4, 3])).partitions == {0, 2, 4}
    assert (await two.renew()).partitions == {1}
    assert (await one.renew(in_use=[0, 2, 4])).partitions == {0, 2, 4}
    assert (await two.renew(in_use=[1])).partitions == {1, 3}


async def test_leases_that_are_not_renewed_are_free_again(lease: Lease) -> None:
    short, other = lease("short", ttl_ms=60), lease("next")
    assert (await short.renew()).partitions == set(range(PARTITIONS))
    await asyncio.sleep(0.1)
    assert await other.renew() == Share(("next",), frozenset(range(PARTITIONS)))
    late = await short.renew(in_use=range(PARTITIONS))
    assert late == Share(("next", "short"), frozenset()), "in use, and lost all the same"


async def test_a_worker_that_leaves_releases_all(lease: Lease) -> None:
    one, two = lease("one"), lease("two")
    await one.renew()
    await two.renew()
    await one.leave()
    assert await two.renew() == Share(("two",), frozenset(range(PARTITIONS)))


async def test_renewed_leases_last(lease: Lease) -> None:
    one, two = lease("one", ttl_ms=5_000), lease("two")
    for _ in range(3):
        await one.renew(in_use=range(PARTITIONS))
    assert (await two.renew()).partitions == frozenset()


@pytest.mark.parametrize(("partitions", "workers"), [(1, 3), (16, 1), (16, 3), (64, 7)])
async def test_shares_are_even_disjoint_and_complete(lease: Lease, partitions: int, workers: int) -> None:
    everyone = [lease(f"worker {number}", partitions=partitions) for number in range(workers)]
    for _ in range(2):
        for each in everyone:
            await each.renew()
    shares = [(await each.renew()).partitions for each in everyone]
    assert sorted(partition for share in shares for partition in share) == list(range(partitions))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
