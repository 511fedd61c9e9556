"""A whole worker, in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from store.errors import StoreReset
from store.keys import NAMESPACE_NAMES, NamespaceKeys
from store.namespaces import Namespaces
from tests.worker.conftest import OpenWorkshop
from tests.worker.workshop import Workshop, make_event, soon
from worker.namespace_work import WorkerSettings
from worker.runtime import _run

SETTINGS = WorkerSettings(samples_kept=5, dedupe_window_s=60, backlog_limit=1_000, candidate_pool=100, device="cpu")


async def at_epoch(shop: Workshop, number: int) -> bool:
    return await shop.epoch_number() == number


async def test_it_learns_and_derives_until_it_is_told_to_stop(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shop = await open_workshop(partitions=3)
    worker = asyncio.create_task(_run(valkey_url, SETTINGS))
    await shop.streams.enqueue([make_event(f"user {n % 5}", n) for n in range(20)])
    await soon(lambda: at_epoch(shop, 1))
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await worker
    assert sum((await shop.versions()).values()) == 20
    states = await shop.users.load(await shop.versions())
    assert {state.epoch for state in states.values()} == {1}
    assert [await shop.consumers(partition) for partition in range(3)] == [{}, {}, {}]
    assert await shop.redis.exists(shop.keys.lease) == 0


async def test_a_store_that_lost_everything_ends_it_with_one_clear_error(
    open_workshop: OpenWorkshop, valkey_url: str
) -> None:
    shop = await open_workshop(partitions=3)
    worker = asyncio.create_task(_run(valkey_url, SETTINGS))
    await soon(lambda: at_epoch(shop, 0))
    await shop.redis.flushall()
    with pytest.raises(StoreReset):
        await asyncio.wait_for(worker, 30)


async def test_it_may_be_stopped_before_there_is_a_namespace(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    worker = asyncio.create_task(_run(valkey_url, SETTINGS))
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await worker


async def test_it_learns_for_every_namespace_that_comes_and_leaves_those_that_go(
    open_workshop: OpenWorkshop, valkey_url: str
) -> None:
    worker = asyncio.create_task(_run(valkey_url, SETTINGS))
    await asyncio.sleep(0.05)  # before there is any
    shops = {name: await open_workshop(name=name, partitions=2) for name in ("books", "shoes")}
    for shop in shops.values():
        await shop.streams.enqueue([make_event(f"user {n}", n) for n in range(6)])

    await soon(lambda: versions_sum(shops["books"], 6))
    await soon(lambda: versions_sum(shops["shoes"], 6))
    await Namespaces(shops["books"].redis).delete(shops["books"].record)
    await shops["shoes"].streams.enqueue([make_event("late", 99)])
    await soon(lambda: versions_sum(shops["shoes"], 7))
    again = await open_workshop(name="books", partitions=3)
    await again.streams.enqueue([make_event("new", 1)])
    await soon(lambda: versions_sum(again, 1))
    assert not worker.done()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await worker


async def test_what_is_wrong_with_one_namespace_does_not_concern_the_others(
    open_workshop: OpenWorkshop, valkey_url: str
) -> None:
    shops = {name: await open_workshop(name=name, partitions=2) for name in ("books", "lost", "odd", "shoes")}
    redis, odd, lost = shops["books"].redis, shops["odd"].record, shops["lost"].record
    await redis.set(odd.keys.record, replace(odd, learner={"preset": "other"}, revision=odd.revision + 1).encode())
    await redis.delete(lost.keys.marker(0), lost.keys.events(0))
    await redis.set(NamespaceKeys("broken", 1).record, b"no record")
    await redis.sadd(NAMESPACE_NAMES, "broken", "not a name")
    worker = asyncio.create_task(_run(valkey_url, SETTINGS))
    for turn in range(3):  # they fail again and again
        for name in ("books", "shoes"):
            await shops[name].streams.enqueue([make_event(f"user {n}", 10 * turn + n) for n in range(6)])
        for name in ("books", "shoes"):
            await soon(lambda name=name, turn=turn: versions_sum(shops[name], 6 * (turn + 1)))  # type: ignore[misc]
        await asyncio.sleep(0.3)
    await shops["odd"].streams.enqueue([make_event("user", 1)])
    await redis.set(odd.keys.record, replace(odd, revision=odd.revision + 2).encode())
    await soon(lambda: versions_sum(shops["odd"], 1), "mended, it is worked on")
    assert not worker.done()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await worker


async def versions_sum(shop: Workshop, wanted: int) -> bool:
    return sum((await shop.versions()).values()) == wanted
