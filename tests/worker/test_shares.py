"""Sharing partitions: all of them are read, by one worker each, whoever comes, goes or is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from store.errors import StoreReset
from store.ownership import Ownership
from tests.valkeys import ask_every_server
from tests.worker.conftest import OpenWorkshop
from tests.worker.workshop import Workshop, make_event, soon
from worker import consumer as consumer_module
from worker import shares as shares_module
from worker.consumer import Consumer
from worker.shares import PartitionShares

PARTITIONS = 6
LEASE_MS = 300


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same work at a pace for tests."""
    monkeypatch.setattr(consumer_module, "READ_BLOCK_MS", 20)
    monkeypatch.setattr(consumer_module, "UNAVAILABLE_PAUSE_S", 0.02)
    monkeypatch.setattr(shares_module, "RENEW_S", 0.03)


class Worker:
    """One worker's share of a workshop, to be stopped, or cut off as a kill would."""

    def __init__(self, shop: Workshop, name: str) -> None:
        self.name = name
        self.stopping = asyncio.Event()
        publisher = shop.publisher(name)

        def consumer(partition: int, ending: asyncio.Event) -> Consumer:
            return Consumer(partition, name, shop.streams, publisher, ending, on_applied=lambda place, applied: None)

        ownership = Ownership(shop.redis, shop.keys, name, ttl_ms=LEASE_MS)
        self.shares = PartitionShares(
            ownership, shop.streams, name, self.stopping, partitions=PARTITIONS, consumer=consumer
        )
        self.task = asyncio.create_task(self.shares.run())

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, 30)


@asynccontextmanager
async def at_work(shop: Workshop, *names: str) -> AsyncIterator[list[Worker]]:
    workers = [Worker(shop, name) for name in names]
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


async def owners(shop: Workshop) -> list[str]:
    found = [await shop.redis.get(shop.keys.owner(partition)) for partition in range(PARTITIONS)]
    return [owner.decode() if owner else "" for owner in found]


async def shared_by(shop: Workshop, *names: str) -> bool:
    found = await owners(shop)
    return sorted(found.count(name) for name in names) == sorted(
        len(range(place, PARTITIONS, len(names))) for place in range(len(names))
    )


async def drained(shop: Workshop) -> bool:
    return await shop.streams.backlog() == 0


async def test_one_worker_reads_everything_and_lets_go_at_the_end(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(partitions=PARTITIONS)
    async with at_work(shop, "a"):
        await soon(lambda: shared_by(shop, "a"))
        await shop.streams.enqueue([make_event(f"user {n % 20}", n) for n in range(100)])
        await soon(lambda: drained(shop))
    assert sum((await shop.versions()).values()) == 100
    assert await owners(shop) == [""] * PARTITIONS
    assert await shop.redis.zcard(shop.keys.workers) == 0


async def test_workers_that_come_and_go_share_evenly(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(partitions=PARTITIONS)
    async with at_work(shop, "a", "b", "c") as (first, *_):
        for round_number in range(3):
            await shop.streams.enqueue([make_event(f"user {n % 20}", n) for n in range(round_number, 200, 3)])
            await asyncio.sleep(0.02)
        await soon(lambda: shared_by(shop, "a", "b", "c"))
        await first.stop()
        await soon(lambda: shared_by(shop, "b", "c"))
        late = Worker(shop, "d")
        await soon(lambda: shared_by(shop, "b", "c", "d"))
        await soon(lambda: drained(shop))
        await late.stop()
    assert sum((await shop.versions()).values()) == 200
    assert (await shop.users.counters())["applied"] == 200


async def test_the_partitions_of_one_that_is_gone_are_taken_with_what_it_left(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(partitions=PARTITIONS)
    dead = Ownership(shop.redis, shop.keys, "dead", ttl_ms=LEASE_MS)
    await dead.attend()
    assert await dead.hold(range(PARTITIONS)) == set(range(PARTITIONS))
    events = [make_event(f"user {n % 20}", n) for n in range(40)]
    await shop.streams.enqueue(events)
    for partition in range(PARTITIONS):
        await shop.streams.read(partition, "dead", count=99, block_ms=0)
    async with at_work(shop, "a"):
        await soon(lambda: drained(shop))
        await soon(lambda: shared_by(shop, "a"))
    assert sum((await shop.versions()).values()) == 40
    async with at_work(shop, "b"):  # whoever takes a partition next finds the dead one's name with nothing pending
        await soon(lambda: shared_by(shop, "b"))
        assert [name for p in range(PARTITIONS) for name in await shop.consumers(p) if name == "dead"] == []


async def test_an_outage_is_waited_out(open_workshop: OpenWorkshop, redis: Redis) -> None:
    shop = await open_workshop(partitions=PARTITIONS)
    async with at_work(shop, "a", "b"):
        for _ in range(10):
            await ask_every_server(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.03)
        await shop.streams.enqueue([make_event(f"user {n % 20}", n) for n in range(60)])
        await soon(lambda: drained(shop))
    assert sum((await shop.versions()).values()) == 60


async def test_a_lost_store_ends_it(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(partitions=PARTITIONS)
    worker = Worker(shop, "a")
    await soon(lambda: shared_by(shop, "a"))
    await shop.redis.flushall()
    with pytest.raises(StoreReset):
        await asyncio.wait_for(worker.task, 30)
