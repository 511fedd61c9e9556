"""Consumer: no event is lost by a crash or an outage, and only an event that always fails becomes a dead letter."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.client.connection import connect
from metaban.store.errors import StoreReset, StoreUnavailable
from metaban.store.events.event import Delivery
from metaban.store.users.records import UserState, UserUpdate
from metaban.worker.learning import consumer as consumer_module
from metaban.worker.learning import fit_batcher as fit_batcher_module
from metaban.worker.learning import reader as reader_module
from metaban.worker.learning.publisher import Publisher
from tests.valkeys import ask_every_server
from tests.worker import workshop
from tests.worker.workshop import OpenWorkshop, Workshop, make_event, soon


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter times for tests."""
    monkeypatch.setattr(reader_module, "STALLED_AFTER_MS", 60)
    monkeypatch.setattr(reader_module, "CLAIM_EVERY_S", 0.02)
    monkeypatch.setattr(reader_module, "READ_BLOCK_MS", 20)
    monkeypatch.setattr(consumer_module, "UNAVAILABLE_PAUSE_S", 0.02)


@asynccontextmanager
async def at_work(shop: Workshop, *names: str, watch: list[int] | None = None) -> AsyncIterator[None]:
    """Run consumers of every partition; stop them at the end."""
    tasks = []
    for name in names:
        publisher = shop.publisher(name)
        if watch is not None:
            watched(publisher, watch)
        tasks += [
            asyncio.create_task(shop.consumer(name, partition, publisher=publisher).run())
            for partition in range(shop.record.partitions)
        ]
    try:
        yield
        assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
    finally:
        shop.stopping.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)


def watched(publisher: Publisher, sizes: list[int]) -> None:
    """Record how many deliveries are published at once."""
    publish: Callable[[int, Sequence[Delivery]], Any] = publisher.publish

    async def counted(partition: int, deliveries: Sequence[Delivery]) -> int | None:
        sizes.append(len(deliveries))
        outcome: int | None = await publish(partition, deliveries)
        return outcome

    publisher.publish = counted  # type: ignore[method-assign]


async def break_user(shop: Workshop, user: str) -> None:
    """Store a sample that cannot be fitted."""
    [delivery] = await shop.give([make_event(user, 900)], "breaker")
    assert delivery.event is not None
    state = UserState(user, 0, 1, 0, {"head": np.zeros(2, dtype=np.float32)})
    foreign = replace(delivery.event.sample(), features=np.zeros(1, dtype=np.float32))
    update = UserUpdate(state, 0, 0, [foreign], [delivery.entry_id])
    await shop.users.apply(0, "breaker", [delivery.entry_id], [update])


async def drained(shop: Workshop) -> bool:
    return await shop.streams.backlog() == 0


async def only_one_is_left(shop: Workshop) -> bool:
    return await shop.streams.backlog() == 1


async def total(shop: Workshop) -> int:
    return sum((await shop.versions()).values())


class TestReading:
    async def test_events_of_all_partitions_are_applied(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(partitions=3)
        async with at_work(shop, "c1"):
            await shop.streams.enqueue([make_event(f"user {n % 7}", n) for n in range(100)])
            await soon(lambda: drained(shop))
        assert await total(shop) == 100
        assert await shop.pending() == 0

    async def test_a_stop_finishes_the_current_batch(self, shop: Workshop) -> None:
        await shop.streams.enqueue([make_event(f"user {n % 7}", n) for n in range(30)])
        async with at_work(shop, "c1"):
            await asyncio.sleep(0.005)
        assert await shop.pending() == 0
        assert await total(shop) in (0, 30)

    async def test_a_stop_finishes_claimed_events(self, shop: Workshop) -> None:
        await shop.give([make_event("a", n) for n in range(10)], "gone")
        await asyncio.sleep(0.1)  # they have been idle long enough
        publisher = shop.publisher("c1")
        publish: Callable[[int, Sequence[Delivery]], Any] = publisher.publish

        async def stopped_meanwhile(partition: int, deliveries: Sequence[Delivery]) -> int | None:
            shop.stopping.set()
            outcome: int | None = await publish(partition, deliveries)
            return outcome

        publisher.publish = stopped_meanwhile  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            await shop.consumer("c1", publisher=publisher).run()
        assert (await shop.pending(), await total(shop)) == (0, 10)

    @pytest.mark.parametrize("claimed", [False, True])
    async def test_events_left_by_a_stop_are_learned_by_the_next_worker(
        self, shop: Workshop, monkeypatch: pytest.MonkeyPatch, claimed: bool
    ) -> None:
        monkeypatch.setattr(fit_batcher_module, "FINISH_S", 0.0)
        if claimed:
            await shop.give([make_event("a", n) for n in range(10)], "gone")
        else:
            await shop.streams.enqueue([make_event("a", n) for n in range(10)])
        publisher = shop.publisher("c1")
        publish: Callable[[int, Sequence[Delivery]], Any] = publisher.publish

        async def stopped_meanwhile(partition: int, deliveries: Sequence[Delivery]) -> int | None:
            shop.stopping.set()
            outcome: int | None = await publish(partition, deliveries)
            return outcome

        publisher.publish = stopped_meanwhile  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            await shop.consumer("c1", publisher=publisher).run()
        assert (await shop.pending(), await total(shop)) == (10, 0)
        counted = await shop.redis.hvals(shop.keys.attempts(0))
        assert sum(map(int, counted)) == 0  # an attempt that did not begin does not count
        shop.stopping.clear()
        async with at_work(shop, "c2"):
            await soon(lambda: drained(shop))
        assert (await shop.pending(), await total(shop), await shop.dead_letters()) == (0, 10, [])

    async def test_a_lost_group_is_created_again_and_no_event_is_skipped(self, shop: Workshop) -> None:
        async with at_work(shop, "c1"):
            await shop.redis.xgroup_destroy(shop.keys.events(0), "learners")
            await shop.streams.enqueue([make_event("a", n) for n in range(5)])
            await soon(lambda: drained(shop))
        assert await shop.versions() == {"a": 5}

    async def test_a_group_lost_repeatedly_does_not_stop_the_consumer(self, shop: Workshop) -> None:
        async with at_work(shop, "c1"):
            for _ in range(20):
                # Long enough to read again with the new group.
                await asyncio.sleep(0.02)
                await shop.redis.xgroup_destroy(shop.keys.events(0), "learners")
            await shop.streams.enqueue([make_event("a", n) for n in range(5)])
            await soon(lambda: drained(shop))
        assert await shop.versions() == {"a": 5}

    async def test_a_lost_store_stops_the_consumer(self, shop: Workshop) -> None:
        running = asyncio.create_task(shop.consumer().run())
        await shop.redis.flushall()
        with pytest.raises(StoreReset):
            await asyncio.wait_for(running, 30)


class TestTakingOver:
    async def test_events_of_a_dead_consumer_are_processed_one_by_one(self, shop: Workshop) -> None:
        await shop.give([make_event(f"user {n % 2}", n) for n in range(5)], "dead")
        sizes: list[int] = []
        async with at_work(shop, "c1", watch=sizes):
            await soon(lambda: drained(shop))
        assert sizes == [1, 1, 1, 1, 1]
        assert await shop.versions() == {"user 0": 3, "user 1": 2}
        samples = await shop.users.load_samples(["user 0"])
        assert [sample.arm_id for sample in samples["user 0"]] == ["0", "2", "4"]
        assert await shop.redis.hlen(shop.keys.attempts(0)) == 0

    async def test_the_next_consumer_claims_at_once_and_the_previous_one_is_too_late(
        self, shop: Workshop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader_module, "STALLED_AFTER_MS", 60_000)
        deliveries = await shop.give([make_event("a", 1), make_event("a", 2)], "slow")
        async with at_work(shop, "c1"):
            await soon(lambda: drained(shop))
            assert await shop.publisher("slow").publish(0, deliveries) is None
        assert await shop.consumers() == {"slow": 0, "c1": 0}
        assert await shop.versions() == {"a": 2}

    async def test_an_event_tried_alone_before_has_to_wait(
        self, shop: Workshop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have killed a consumer: other events come first."""
        monkeypatch.setattr(reader_module, "STALLED_AFTER_MS", 60_000)
        suspect, _ = await shop.give([make_event("suspect", 1), make_event("a", 2)], "dead")
        await shop.streams.count_attempt(suspect, "dead")
        async with at_work(shop, "c1"):
            await shop.streams.enqueue([make_event("b", 3)])
            await soon(lambda: only_one_is_left(shop))
            assert await shop.versions() == {"a": 1, "b": 1}
            monkeypatch.setattr(reader_module, "STALLED_AFTER_MS", 1)
            await soon(lambda: drained(shop))
        assert await shop.versions() == {"a": 1, "b": 1, "suspect": 1}

    async def test_several_consumers_claim_each_event_once(
        self, shop: Workshop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader_module, "STALLED_AFTER_MS", 500)
        await shop.give([make_event(f"user {n % 3}", n) for n in range(40)], "dead")
        async with at_work(shop, "c1", "c2", "c3"):
            await soon(lambda: drained(shop))
        assert await total(shop) == 40
        assert (await shop.users.counters())["applied"] == 40
        assert await shop.dead_letters() == []

    async def test_an_event_deleted_by_hand_is_skipped(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 1), make_event("a", 2)], "dead")
        await shop.redis.xdel(shop.keys.events(0), deliveries[0].entry_id)
        async with at_work(shop, "c1"):
            await soon(lambda: drained(shop))
            await soon(lambda: nothing_pending(shop))
        assert await shop.versions() == {"a": 1}


async def nothing_pending(shop: Workshop) -> bool:
    return await shop.pending() == 0


class TestGivingUp:
    async def test_an_event_that_always_fails_becomes_a_dead_letter(self, shop: Workshop) -> None:
        await break_user(shop, "broken")
        sizes: list[int] = []
        await shop.streams.enqueue(
            [make_event("a", 1), make_event("broken", 2), make_event("a", 3), make_event("b", 4)]
        )
        async with at_work(shop, "c1", watch=sizes):
            await soon(lambda: drained(shop))
        assert await shop.versions() == {"broken": 1, "a": 2, "b": 1}
        [letter] = await shop.dead_letters()
        assert letter[b"dead_reason"] == b"not applied after 5 attempts"
        assert letter[b"u"] == b"broken"
        assert await shop.redis.hlen(shop.keys.attempts(0)) == 0
        assert await shop.pending() == 0
        # Once together, then each alone: the valid ones once, the failing one up to the limit.
        assert sizes[0] == 4
        assert set(sizes[1:]) == {1}
        assert len(sizes) == 1 + 3 + consumer_module.SOLO_ATTEMPTS_MAX

    async def test_an_outage_does_not_count_as_an_attempt(self, shop: Workshop) -> None:
        publisher = shop.publisher("c1")
        real, outages = publisher.publish, iter(range(2 * consumer_module.SOLO_ATTEMPTS_MAX))

        async def publish(partition: int, deliveries: Sequence[Delivery]) -> int | None:
            if next(outages, None) is not None:
                raise StoreUnavailable("away")
            return await real(partition, deliveries)

        publisher.publish = publish
        await shop.give([make_event("a", 1)], consumer="dead")
        work = asyncio.create_task(shop.consumer("c1", publisher=publisher).run())
        await soon(lambda: drained(shop))
        shop.stopping.set()
        await work
        assert next(outages, None) is None
        assert await shop.dead_letters() == []
        assert await shop.versions() == {"a": 1}

    async def test_events_of_other_users_do_not_become_dead_letters(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(partitions=2)
        names = [f"user {n}" for n in range(40)]
        first = [name for name in names if shop.keys.partition_of(name) == 0]
        second = [name for name in names if shop.keys.partition_of(name) == 1]
        await break_user(shop, first[0])
        await shop.streams.enqueue([make_event(first[0], n) for n in range(4)])
        async with at_work(shop, "c1"):
            for n in range(30):
                await shop.streams.enqueue([make_event(user, n) for user in (*first[1:3], *second[:3])])
                await asyncio.sleep(0.01)
            await soon(lambda: drained(shop))
        letters = [letter[b"u"].decode() for partition in (0, 1) for letter in await shop.dead_letters(partition)]
        assert letters == [first[0]] * 4
        versions = await shop.versions()
        assert all(versions[user] == 30 for user in (*first[1:3], *second[:3]))


class TestOutages:
    async def test_killed_connections_lose_and_double_no_event(self, shop: Workshop, redis: Redis) -> None:
        """After a lost reply the client cannot know whether the command was executed."""
        accepted = 60
        await shop.streams.enqueue([make_event(f"user {n % 4}", n) for n in range(accepted)])
        async with at_work(shop, "c1", "c2"):
            for _ in range(25):
                await ask_every_server(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await asyncio.sleep(0.01)
            await soon(lambda: drained(shop))
        assert await total(shop) == (await shop.users.counters())["applied"] == accepted
        assert await shop.dead_letters() == []

    async def test_a_store_that_does_not_answer_for_a_while(
        self, shop: Workshop, redis: Redis, valkey_url: str, compute: Any
    ) -> None:
        impatient = connect(valkey_url, socket_timeout_s=0.15)
        slow_shop = Workshop(impatient, shop.record, compute, samples_kept=5)
        async with at_work(slow_shop, "c1"):
            await ask_every_server(redis, "CLIENT", "PAUSE", 400, "ALL")
            await shop.streams.enqueue([make_event("a", n) for n in range(10)])
            await soon(lambda: drained(shop))
        assert await shop.versions() == {"a": 10}
        await impatient.aclose()


class TestProcesses:
    """`metaban worker` as a real process."""

    async def test_a_stop_leaves_nothing_behind(self, open_workshop: OpenWorkshop, valkey_url: str) -> None:
        shop = await open_workshop(partitions=2)
        worker = shop.start_process(valkey_url)
        try:
            await shop.streams.enqueue([make_event(f"user {n % 5}", n) for n in range(200)])
            await soon(lambda: drained(shop), "the worker applies events")
            await shop.streams.enqueue([make_event(f"user {n % 5}", n) for n in range(200, 400)])
            worker.send_signal(signal.SIGTERM)
            _, said = await asyncio.to_thread(worker.communicate, timeout=workshop.SOON_S)
        finally:
            worker.kill()
        assert worker.returncode == 0, said
        assert await shop.pending() == 0
        assert {**await shop.consumers(0), **await shop.consumers(1)} == {}
        assert await total(shop) + await shop.streams.backlog() == 400
        assert await shop.epoch_number() is not None

    async def test_another_worker_continues_after_a_kill(self, open_workshop: OpenWorkshop, valkey_url: str) -> None:
        shop = await open_workshop(partitions=2)
        accepted = 600
        first = shop.start_process(valkey_url)
        second = None
        try:
            await shop.streams.enqueue([make_event(f"user {n % 9}", n) for n in range(accepted // 2)])
            await soon(lambda: some_applied(shop), "the worker applies events")
            second = shop.start_process(valkey_url)
            await shop.streams.enqueue([make_event(f"user {n % 9}", n) for n in range(accepted // 2, accepted)])
            first.kill()
            await soon(lambda: drained(shop), "the second worker finishes")
            second.send_signal(signal.SIGTERM)
            _, said = await asyncio.to_thread(second.communicate, timeout=workshop.SOON_S)
            assert second.returncode == 0, said
        finally:
            first.kill()
            first.communicate()
            if second is not None:
                second.kill()
                second.communicate()
        assert await total(shop) == (await shop.users.counters())["applied"] == accepted
        assert await shop.pending() == 0
        assert [await shop.dead_letters(partition) for partition in (0, 1)] == [[], []]


async def some_applied(shop: Workshop) -> bool:
    return await total(shop) > 0
