"""Leases of partitions: one holder each, free again when nobody keeps them; shares that are even and complete."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from store.keys import NamespaceKeys
from store.ownership import Ownership, fair_share


@given(st.integers(1, 64), st.sets(st.text(min_size=1, max_size=4), min_size=1, max_size=9))
def test_shares_are_even_disjoint_and_complete(partitions: int, workers: set[str]) -> None:
    shares = [fair_share(partitions, worker, workers) for worker in workers]
    assert sorted(partition for share in shares for partition in share) == list(range(partitions))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_worker_that_is_not_counted_yet_counts_itself() -> None:
    assert fair_share(4, "b", ["a"]) == {1, 3}


async def test_a_partition_has_one_holder(redis: Redis, keys: NamespaceKeys) -> None:
    mine, theirs = (Ownership(redis, keys, token, ttl_ms=60_000) for token in ("mine", "theirs"))
    assert await mine.hold([0, 1]) == {0, 1}
    assert await theirs.hold([0, 1]) == set()
    assert await mine.hold([0]) == {0}  # held already, and kept
    assert await theirs.release([0, 1]) == set()
    assert await mine.release([1]) == {1}
    assert await theirs.hold([0, 1]) == {1}
    assert await mine.hold([]) == set()


async def test_what_is_not_renewed_is_free_again(redis: Redis, keys: NamespaceKeys) -> None:
    short, next_one = Ownership(redis, keys, "short", ttl_ms=60), Ownership(redis, keys, "next", ttl_ms=60_000)
    assert await short.attend() == ["short"]
    assert await short.hold([0]) == {0}
    assert await next_one.attend() == ["next", "short"]
    await asyncio.sleep(0.1)
    assert await next_one.attend() == ["next"]
    assert await next_one.hold([0]) == {0}
    assert await short.hold([0]) == set()


async def test_whoever_leaves_is_counted_no_more(redis: Redis, keys: NamespaceKeys) -> None:
    one, two = (Ownership(redis, keys, token, ttl_ms=60_000) for token in ("one", "two"))
    await one.attend()
    assert await two.attend() == ["one", "two"]
    assert await one.leave() == ["two"]
    assert await two.attend() == ["two"]


async def test_renewing_makes_it_last(redis: Redis, keys: NamespaceKeys) -> None:
    one = Ownership(redis, keys, "one", ttl_ms=80)
    for _ in range(5):
        await one.attend()
        await one.hold([0])
        await asyncio.sleep(0.03)
    assert await redis.get(keys.owner(0)) == b"one"
    assert await one.attend() == ["one"]
