"""A whole worker in this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from structlog.testing import capture_logs

from metaban.models.learner import State
from metaban.store.errors import StoreReset
from metaban.store.keys import NAMESPACE_NAMES, NamespaceKeys
from metaban.store.namespaces import NamespaceStore
from metaban.worker.epochs import epoch_trainer
from metaban.worker.epochs.derive_shared import derive_shared
from metaban.worker.namespace import WorkerSettings
from metaban.worker.process import work_until_signal
from tests.worker.workshop import OpenWorkshop, Workshop, make_event, soon

SETTINGS = WorkerSettings(samples_kept=5, backlog_limit=1_000, candidate_pool=100, device="cpu")


async def at_epoch(shop: Workshop, number: int) -> bool:
    return await shop.epoch_number() == number


async def test_it_learns_and_publishes_epochs_until_it_is_stopped(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shop = await open_workshop(partitions=3)
    worker = asyncio.create_task(work_until_signal(valkey_url, SETTINGS))
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


async def test_rewards_do_not_wait_for_an_epoch(
    open_workshop: OpenWorkshop, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, deriving, going_on = await open_workshop(), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> State:
        deriving.set()
        assert going_on.wait(60)
        return derive_shared(*arguments)

    monkeypatch.setattr(epoch_trainer, "derive_shared", slow)
    worker = asyncio.create_task(work_until_signal(valkey_url, SETTINGS))
    try:
        await shop.streams.enqueue([make_event("a", n) for n in range(16)])
        assert await asyncio.to_thread(deriving.wait, 60)
        await shop.streams.enqueue([make_event("a", 16)])

        async def applied() -> bool:
            return await shop.versions() == {"a": 17}

        await soon(applied)
        assert await shop.epoch_number() == 0
    finally:
        going_on.set()
    await soon(lambda: at_epoch(shop, 1))
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await worker


async def test_an_emptied_store_ends_it_with_one_error(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shop = await open_workshop(partitions=3)
    worker = asyncio.create_task(work_until_signal(valkey_url, SETTINGS))
    await soon(lambda: at_epoch(shop, 0))
    await shop.redis.flushall()
    with pytest.raises(StoreReset):
        await asyncio.wait_for(worker, 30)


async def test_workers_keep_as_many_samples_as_the_record_says(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shop = await open_workshop(partitions=4, samples_kept=3)
    differing = [replace(SETTINGS, samples_kept=kept) for kept in (2, 9)]
    workers = {asyncio.create_task(work_until_signal(valkey_url, settings)) for settings in differing}
    users = [f"user {n}" for n in range(12)]

    async def kept() -> set[int]:
        return {await shop.redis.llen(shop.keys.samples(user)) for user in users}

    async def applied(events: int) -> bool:
        return sum((await shop.versions()).values()) == events

    await shop.streams.enqueue([make_event(user, n) for n in range(6) for user in users])
    await soon(lambda: applied(72))
    assert await kept() == {3}
    record = await shop.namespaces.reload(shop.record)
    assert await shop.namespaces.change(record, learner={**record.learner, "samples_kept": 4})

    numbers = count(6)

    async def changed() -> bool:
        number = next(numbers)
        await shop.streams.enqueue([make_event(user, number) for user in users])
        await soon(lambda: applied(12 * (number + 1)))
        return await kept() == {4}

    await soon(changed)
    async with asyncio.timeout(30):
        while workers:  # more than once: the driver may swallow a cancellation
            for worker in workers:
                worker.cancel()
            _, workers = await asyncio.wait(workers, timeout=0.5)


async def test_a_worker_completes_an_older_record(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shop = await open_workshop()
    older = {name: value for name, value in shop.record.learner.items() if name != "samples_kept"}
    await shop.redis.set(shop.keys.record, replace(shop.record, learner=older, rewards=None).encode())
    worker = asyncio.create_task(work_until_signal(valkey_url, replace(SETTINGS, samples_kept=2)))
    await shop.streams.enqueue([make_event("u", n) for n in range(6)])
    await soon(lambda: versions_sum(shop, 6))
    assert await shop.redis.llen(shop.keys.samples("u")) == 2
    record = await shop.namespaces.reload(shop.record)
    assert (record.learner["samples_kept"], record.rewards) == (2, SETTINGS.rewards.to_json())
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await worker


async def test_it_can_be_stopped_without_namespaces(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    with capture_logs() as lines:
        worker = asyncio.create_task(work_until_signal(valkey_url, SETTINGS))

        async def started() -> bool:
            return any(line["event"] == "worker_started" for line in lines)

        await soon(started)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await worker
    (line,) = (line for line in lines if line["event"] == "worker_started")
    assert (line["namespaces"], line["waiting_for"]) == (0, "a service that creates the first namespace")


async def test_it_starts_on_new_namespaces_and_stops_on_deleted_ones(
    open_workshop: OpenWorkshop, valkey_url: str
) -> None:
    worker = asyncio.create_task(work_until_signal(valkey_url, SETTINGS))
    await asyncio.sleep(0.05)  # before there are namespaces
    shops = {name: await open_workshop(name=name, partitions=2) for name in ("books", "shoes")}
    for shop in shops.values():
        await shop.streams.enqueue([make_event(f"user {n}", n) for n in range(6)])

    await soon(lambda: versions_sum(shops["books"], 6))
    await soon(lambda: versions_sum(shops["shoes"], 6))
    await NamespaceStore(shops["books"].redis).delete(shops["books"].record)
    await shops["shoes"].streams.enqueue([make_event("late", 99)])
    await soon(lambda: versions_sum(shops["shoes"], 7))
    again = await open_workshop(name="books", partitions=3)
    await again.streams.enqueue([make_event("new", 1)])
    await soon(lambda: versions_sum(again, 1))
    assert not worker.done()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await worker


async def test_a_broken_namespace_does_not_affect_the_others(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shops = {name: await open_workshop(name=name, partitions=2) for name in ("books", "lost", "odd", "shoes")}
    redis, odd, lost = shops["books"].redis, shops["odd"].record, shops["lost"].record
    await redis.set(odd.keys.record, replace(odd, learner={"preset": "other"}, revision=odd.revision + 1).encode())
    await redis.delete(lost.keys.marker(0), lost.keys.events(0))
    await redis.set(NamespaceKeys("broken", 1).record, b"no record")
    await redis.sadd(NAMESPACE_NAMES, "broken", "not a name")
    worker = asyncio.create_task(work_until_signal(valkey_url, SETTINGS))
    for turn in range(3):  # they fail repeatedly
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


async def test_many_namespaces_stop_together(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shops = [await open_workshop(name=f"shop-{number}", partitions=2) for number in range(20)]
    worker = shops[0].start_process(valkey_url, METABAN_LOG_FORMAT="json")
    for shop in shops:
        await soon(lambda shop=shop: at_epoch(shop, 0))  # type: ignore[misc]
        await shop.streams.enqueue([make_event(f"user {n}", n) for n in range(20)])
    worker.terminate()
    _, said = await asyncio.to_thread(worker.communicate, timeout=60)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith(b"{")]
    events = [line["event"] for line in lines]
    assert worker.returncode == 0, said.decode()
    assert events.count("worker_stopped") == 20
    assert events.index("worker_stopping") < events.index("worker_stopped")
    assert (events[-1], lines[-1]["namespaces"]) == ("worker_process_stopped", 20)
    for shop in shops:
        assert [await shop.consumers(partition) for partition in range(2)] == [{}, {}]
        assert await shop.redis.exists(shop.keys.lease) == 0


async def versions_sum(shop: Workshop, wanted: int) -> bool:
    return sum((await shop.versions()).values()) == wanted
