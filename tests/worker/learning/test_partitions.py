"""PartitionConsumers: each partition is consumed by one worker while workers join, leave and die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from metaban.store.errors import StoreReset
from metaban.store.shared.partition_leases import PartitionLeases
from metaban.worker.learning import consumer as consumer_module
from metaban.worker.learning import partitions as shares_module
from metaban.worker.learning import reader as reader_module
from metaban.worker.learning.consumer import Consumer
from metaban.worker.learning.partitions import PartitionConsumers
from metaban.worker.learning.reader import EventReader
from tests.valkeys import ask_every_server
from tests.worker.workshop import OpenWorkshop, Workshop, make_event, soon

PARTITIONS = 6
LEASE_MS = 300


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter times for tests."""
    monkeypatch.setattr(reader_module, "READ_BLOCK_MS", 20)
    monkeypatch.setattr(consumer_module, "UNAVAILABLE_PAUSE_S", 0.02)
    monkeypatch.setattr(shares_module, "RENEW_S", 0.03)


class Worker:
    """The PartitionConsumers of one worker, to be stopped or cancelled."""

    def __init__(self, shop: Workshop, name: str) -> None:
        self.name = name
        self.stopping = asyncio.Event()
        publisher = shop.publisher(name)

        shared = EventReader(shop.streams, name)

        def consumer(partition: int, ending: asyncio.Event) -> Consumer:
            reader = shared if shop.streams.reads_together else EventReader(shop.streams, name)
            return Consumer(
                partition, name, shop.streams, reader, publisher, ending, on_applied=lambda place, applied: None
            )

        leases = PartitionLeases(shop.redis, shop.keys, name, ttl_ms=LEASE_MS)
        self.consumers = PartitionConsumers(leases, shop.streams, self.stopping, consumer=consumer)
        self.task = asyncio.create_task(self.consumers.run())

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
    return [status.owner or "" for status in await shop.streams.status(())]


async def shared_by(shop: Workshop, *names: str) -> bool:
    found = await owners(shop)
    return sorted(found.count(name) for name in names) == sorted(
        len(range(place, PARTITIONS, len(names))) for place in range(len(names))
    )


async def drained(shop: Workshop) -> bool:
    return await shop.streams.backlog() == 0


async def test_one_worker_consumes_all_partitions_and_releases_them_at_the_end(open_workshop: OpenWorkshop) -> None:
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


async def none_called(shop: Workshop, name: str) -> bool:
    """Whether no partition has a stream consumer of this name."""
    return all([name not in await shop.consumers(partition) for partition in range(PARTITIONS)])


async def test_partitions_and_pending_events_of_a_dead_worker_are_taken_over(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(partitions=PARTITIONS)
    dead = PartitionLeases(shop.redis, shop.keys, "dead", ttl_ms=LEASE_MS)
    assert (await dead.renew()).partitions == set(range(PARTITIONS))
    events = [make_event(f"user {n % 20}", n) for n in range(40)]
    await shop.streams.enqueue(events)
    for partition in range(PARTITIONS):
        await shop.streams.read([partition], "dead", count=99, block_ms=0)
    async with at_work(shop, "a"):
        await soon(lambda: drained(shop))
        await soon(lambda: shared_by(shop, "a"))
    assert sum((await shop.versions()).values()) == 40
    async with at_work(shop, "b"):  # deletes the dead worker's stream consumers, which have nothing pending
        await soon(lambda: none_called(shop, "dead"))
        await soon(lambda: shared_by(shop, "b"))


async def test_an_outage_is_waited_out(open_workshop: OpenWorkshop, redis: Redis) -> None:
    shop = await open_workshop(partitions=PARTITIONS)
    async with at_work(shop, "a", "b"):
        for _ in range(10):
            await ask_every_server(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.03)
        await shop.streams.enqueue([make_event(f"user {n % 20}", n) for n in range(60)])
        await soon(lambda: drained(shop))
    assert sum((await shop.versions()).values()) == 60


async def test_a_lost_store_raises(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(partitions=PARTITIONS)
    worker = Worker(shop, "a")
    await soon(lambda: shared_by(shop, "a"))
    await shop.redis.flushall()
    with pytest.raises(StoreReset):
        await asyncio.wait_for(worker.task, 30)
