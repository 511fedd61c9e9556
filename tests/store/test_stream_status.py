"""How the event streams are doing, from the first event to dead letters."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from store.events import EventStream
from store.keys import NamespaceKeys
from store.namespaces import Namespaces
from store.ownership import Ownership
from store.stream_status import PartitionStatus
from store.users import COUNTERS
from tests.worker.workshop import make_event

NOTHING = dict.fromkeys(COUNTERS, 0)


@pytest.fixture
async def keys(client: Redis) -> NamespaceKeys:
    return (await Namespaces(client).open_or_create("shop", partitions=2, seed=0, learner={})).keys


@pytest.fixture
def stream(client: Redis, keys: NamespaceKeys) -> EventStream:
    return EventStream(client, keys, dedupe_window_s=60, backlog_limit=100)


def user_of(keys: NamespaceKeys, partition: int) -> str:
    return next(name for name in map(str, range(99)) if keys.partition_of(name) == partition)


async def test_nothing_yet(stream: EventStream) -> None:
    assert await stream.status(COUNTERS) == [
        PartitionStatus(partition, 0, 0, 0, None, None, 0, NOTHING) for partition in range(2)
    ]


async def test_partition_by_partition(client: Redis, keys: NamespaceKeys, stream: EventStream) -> None:
    one, other = user_of(keys, 0), user_of(keys, 1)
    await stream.enqueue([make_event(one, number) for number in range(5)] + [make_event(other, 9)])
    await Ownership(client, keys, "worker 7", ttl_ms=10_000).hold([1])
    delivered = await stream.read(0, "reader", count=3, block_ms=0)
    await stream.bury(delivered[0], "reader", "test")
    first, second = await stream.status(COUNTERS)
    assert (first.waiting, first.pending, first.consumers, first.owner, first.dead_letters) == (4, 2, 1, None, 1)
    assert first.counters == {**NOTHING, "enqueued": 5, "buried": 1}
    assert (second.waiting, second.pending, second.consumers, second.owner) == (1, 0, 0, "worker 7")
    assert second.counters == {**NOTHING, "enqueued": 1}
    for status in (first, second):
        assert status.oldest_age_ms is not None
        assert 0 <= status.oldest_age_ms < 60_000
        counted = status.counters
        done = counted["applied"] + counted["voided"] + counted["buried"]
        assert counted["enqueued"] + counted["replayed"] == done + status.waiting


async def test_ages_are_of_the_oldest_that_waits(client: Redis, keys: NamespaceKeys, stream: EventStream) -> None:
    await stream.enqueue([make_event(user_of(keys, 0), 1)])
    await client.xadd(keys.events(1), {"old": "1"}, id="1000-0")
    await client.xadd(keys.events(1), {"newer": "1"})
    await client.xadd(keys.dead_letters(1), {"any": "1"}, id=f"{2**64 - 1}-1")
    ages = [status.oldest_age_ms for status in await stream.status(COUNTERS)]
    assert ages[0] is not None
    assert ages[0] < 60_000
    assert ages[1] is not None
    assert ages[1] > 40 * 365 * 86_400 * 1_000
    await client.delete(keys.events(1))
    await client.xadd(keys.events(1), {"to come": "1"}, id=f"{2**64 - 1}-1")
    ahead = (await stream.status(COUNTERS))[1]
    assert (ahead.oldest_age_ms, ahead.waiting, ahead.pending, ahead.consumers) == (0, 1, 0, 0)


async def test_a_group_that_was_destroyed(client: Redis, keys: NamespaceKeys, stream: EventStream) -> None:
    await stream.enqueue([make_event(user_of(keys, 0), 1)])
    await client.execute_command("XGROUP", "DESTROY", keys.events(0), "learners")
    await client.delete(keys.events(1))
    first, second = await stream.status(COUNTERS)
    assert (first.waiting, first.pending, first.consumers) == (1, 0, 0)
    assert (second.waiting, second.pending, second.consumers) == (0, 0, 0)
