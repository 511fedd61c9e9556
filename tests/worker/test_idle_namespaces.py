"""What idle namespaces cost a worker: connections and commands, whatever their number of partitions."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from metaban.worker.learning import partitions as partitions_module
from metaban.worker.namespace import WorkerSettings
from metaban.worker.process import work_until_signal
from tests.worker.workshop import OpenWorkshop, Workshop, make_event, soon

NAMES = ("books", "shoes", "tea")
PARTITIONS = 64
SETTINGS = WorkerSettings(samples_kept=5, backlog_limit=1_000, candidate_pool=100, device="cpu")

pytestmark = pytest.mark.single_node("one read covers all partitions of a server, not of a cluster")


@pytest.fixture
async def shops(
    open_workshop: OpenWorkshop, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Workshop]]:
    """Namespaces that a worker has been working on for a while."""
    monkeypatch.setattr(partitions_module, "RENEW_S", 0.1)
    shops = [await open_workshop(name=name, partitions=PARTITIONS) for name in NAMES]
    worker = asyncio.create_task(work_until_signal(valkey_url, SETTINGS))

    async def at_work() -> bool:
        statuses = [status for shop in shops for status in await shop.streams.status(())]
        return all(status.owner for status in statuses) and await reads(shops[0].redis) == len(shops)

    await soon(at_work, "one read for each namespace")
    yield shops
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await worker


async def reads(redis: Redis) -> int:
    """Connections that wait for events."""
    return sum("b" in client["flags"] for client in await redis.client_list())


async def calls(redis: Redis) -> dict[str, int]:
    """Commands executed since the statistics were reset."""
    return {name: stats["calls"] for name, stats in (await redis.info("commandstats")).items()}


async def test_connections_do_not_grow_with_partitions(shops: list[Workshop]) -> None:
    for _ in range(20):
        assert await reads(shops[0].redis) <= len(NAMES)
    assert len(await shops[0].redis.client_list()) < PARTITIONS


async def test_commands_do_not_grow_with_partitions(shops: list[Workshop]) -> None:
    redis = shops[0].redis
    await redis.config_resetstat()

    async def renewed() -> bool:
        return (await calls(redis)).get("cmdstat_zadd", 0) >= 10 * len(NAMES)

    await soon(renewed, "ten renewals of each namespace")
    found = await calls(redis)
    renewals = found["cmdstat_zadd"]
    assert found["cmdstat_xreadgroup"] <= 2 * renewals
    assert sum(found.values()) < PARTITIONS * renewals


async def test_a_reward_of_each_namespace_is_applied(shops: list[Workshop]) -> None:
    for number in range(3):
        for shop in shops:
            await shop.streams.enqueue([make_event(f"user {number}", number)])
    for shop in shops:

        async def applied(shop: Workshop = shop) -> bool:
            return await shop.versions() == {f"user {number}": 1 for number in range(3)}

        await soon(applied, shop.keys.namespace)
