"""EventReader: consumers that wait share a read, and none waits for another that is busy."""

from __future__ import annotations

import asyncio

import pytest

from metaban.worker.learning import reader as reader_module
from metaban.worker.learning.reader import EventReader, FoundEvents
from tests.worker.workshop import OpenWorkshop, Workshop, make_event, soon

pytestmark = pytest.mark.single_node("one read covers all partitions of a server, not of a cluster")


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    return await open_workshop(partitions=2)


def wait(reader: EventReader, partition: int, stopping: asyncio.Event) -> asyncio.Task[FoundEvents]:
    return asyncio.create_task(reader.next(partition, stopping))


async def enqueue(shop: Workshop, partition: int, number: int) -> None:
    user = next(name for name in map(str, range(100)) if shop.keys.partition_of(name) == partition)
    await shop.streams.enqueue([make_event(user, number)])


async def test_a_consumer_that_comes_back_is_served_while_the_others_still_wait(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "READ_BLOCK_MS", 60_000)
    reader, stopping = EventReader(shop.streams, "c1"), asyncio.Event()
    first, second = wait(reader, 0, stopping), wait(reader, 1, stopping)
    await soon(lambda: has_reads(shop, 1), "one read for both")
    for number in range(3):
        await enqueue(shop, 0, number)
        found = await asyncio.wait_for(first, 30)
        assert ([delivery.partition for delivery in found.fresh], found.stalled) == ([0], [])
        first = wait(reader, 0, stopping)
    assert not second.done()
    await enqueue(shop, 1, 9)
    assert len((await asyncio.wait_for(second, 30)).fresh) == 1
    first.cancel()


async def test_reads_become_one_again(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "READ_BLOCK_MS", 100)
    reader, stopping = EventReader(shop.streams, "c1"), asyncio.Event()
    first, second = wait(reader, 0, stopping), wait(reader, 1, stopping)
    await enqueue(shop, 0, 1)
    await asyncio.wait_for(first, 30)
    first = wait(reader, 0, stopping)
    await soon(lambda: has_reads(shop, 1), "one read for both")
    stopping.set()
    assert [await asyncio.wait_for(task, 30) for task in (first, second)] == [FoundEvents(), FoundEvents()]


async def has_reads(shop: Workshop, number: int) -> bool:
    """Whether as many connections wait for events."""
    return sum("b" in client["flags"] for client in await shop.redis.client_list()) == number
