"""The replica follows the store through outages, gaps in the log and new epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest
from redis.asyncio import Redis

from metaban.service.engine.model import replica as replica_module
from metaban.store.users.records import UserState
from tests.service.engine.model.replicas import (
    Watched,
    hold_load,
    in_partition,
    last_entry,
    move_to_epoch,
    publish_epoch,
)
from tests.valkeys import ask_every_server
from tests.worker.workshop import Workshop, make_event, soon

pytestmark = pytest.mark.usefixtures("fast_replicas")


class TestFollowing:
    async def test_stored_users_are_served_at_the_start(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 2, "b": 1, "c": 3})
        watched = watch()
        assert not watched.replica.healthy
        await watched.replica.start()
        assert {user: watched.version(user) for user in "abc"} == {"a": 2, "b": 1, "c": 3}
        assert watched.replica.healthy
        await watched.replica.stop()
        assert not watched.replica.healthy
        assert watched.version("a") == 2, "what is loaded stays served"

    async def test_updates_and_new_users_are_served(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        await shop.learn({"a": 2})
        await watched.serves("a", 2)
        await shop.learn({"a": 1, "b": 4}, first=10)
        await watched.serves("a", 3)
        await watched.serves("b", 4)

    async def test_update_during_the_start(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        await shop.learn({"a": 1, "b": 1})
        watched = watch()
        come, passing = hold_load(watched.users, "a")
        starting = asyncio.create_task(watched.replica.start())
        await come.wait()
        await shop.learn({"a": 1, "late": 1}, first=10)
        passing.set()
        await starting
        await watched.serves("a", 2)
        await watched.serves("late", 1)
        await watched.serves("b", 1)

    async def test_users_that_are_not_held_are_not_loaded(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        await shop.learn({"a": 1})
        watched = watch(pool=1)
        await watched.replica.start()
        await shop.learn({"b": 1, "a": 1}, first=10)
        await watched.serves("a", 2)
        assert watched.version("b") is None
        await watched.replica.refresh("b")
        assert watched.version("b") == 1
        await shop.learn({"b": 1}, first=20)
        await watched.serves("b", 2)

    async def test_refresh_of_an_unknown_user(self, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        await watched.replica.refresh("nobody")
        assert watched.version("nobody") is None

    async def test_log_trimmed_past_the_position(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        first, second, busy = in_partition(shop, 0, 3)
        await shop.learn({first: 1, second: 1, busy: 1})
        watched = watch(log_cap=100)
        await watched.replica.start()
        come, passing = hold_load(watched.users, first)
        await shop.learn({first: 1}, first=10)
        await come.wait()
        await shop.learn({second: 1}, first=20)
        state = (await watched.users.load([busy]))[busy]
        for _ in range(4):
            await watched.users.rebase(0, [state] * 100)
        passing.set()
        await watched.serves(first, 2)
        await watched.serves(second, 2)

    async def test_log_trimmed_while_far_behind(
        self, shop: Workshop, watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replica_module, "TAIL_ENTRIES", 1)  # each read returns one full page
        first, second, busy = in_partition(shop, 0, 3)
        await shop.learn({first: 1, second: 1, busy: 1})
        watched = watch(log_cap=100)
        await watched.replica.start()
        come, passing = hold_load(watched.users, first)
        await shop.learn({first: 1}, first=10)
        await come.wait()
        await shop.learn({second: 1}, first=20)
        state = (await shop.users.load([busy]))[busy]
        for _ in range(4):
            await watched.users.rebase(0, [state] * 100)
        passing.set()
        await watched.serves(first, 2)
        await watched.serves(second, 2)

    async def test_stop_right_after_the_start(self, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await watched.replica.stop()
        assert all(task.done() for task in watched.replica._tasks)


class TestOutages:
    async def test_recovers_after_an_outage(self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]) -> None:
        await shop.learn({"a": 1})
        watched = watch()
        await watched.replica.start()
        for round_ in range(2, 6):
            await ask_every_server(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.01)
            await self.learn_through(shop, {"a": 1, f"new {round_}": 1}, first=10 * round_)
            await watched.serves("a", round_)
            await watched.serves(f"new {round_}", 1)
        await publish_epoch(shop, 0, 0)
        await ask_every_server(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(0.01)
        await publish_epoch(shop, 1, 16)

        async def served() -> bool:
            return watched.model.epoch_number == 1 and watched.replica.healthy

        await soon(served)

    async def test_unexpected_error_does_not_end_the_replica(
        self, shop: Workshop, watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched = watch()
        await watched.replica.start()
        put, failures = watched.model.put, iter(range(2))

        def put_later(states: list[UserState], *doubted: Any) -> None:
            if next(failures, None) is not None:
                raise KeyError("unheard of")
            put(states)

        monkeypatch.setattr(watched.model, "put", put_later)
        await shop.learn({"a": 2})
        await watched.serves("a", 2)

        async def healthy() -> bool:
            return watched.replica.healthy

        await soon(healthy)

    async def learn_through(self, shop: Workshop, plan: dict[str, int], *, first: int) -> None:
        """Dead connections of the pool are found one by one."""
        for _ in range(20):
            try:
                await shop.redis.ping()
            except OSError:
                continue
            except Exception:
                await asyncio.sleep(0)
        await shop.learn(plan, first=first)

    async def test_unhealthy_while_behind(self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        key = shop.keys.update_log(0)
        await shop.learn({in_partition(shop, 0, 1)[0]: 1})
        await redis.rename(key, f"{key} away")
        await redis.set(key, "no stream")

        async def unhealthy() -> bool:
            await ask_every_server(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            return not watched.replica.healthy

        await soon(unhealthy)
        await redis.rename(f"{key} away", key)

        async def healthy() -> bool:
            return watched.replica.healthy

        await soon(healthy)

    async def test_undecodable_user_does_not_affect_others(
        self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]
    ) -> None:
        broken, sound = in_partition(shop, 0, 2)
        await shop.learn({broken: 1, sound: 1})
        watched = watch()
        await watched.replica.start()
        come, passing = hold_load(watched.users, broken)
        await shop.learn({broken: 1}, first=10)
        await come.wait()
        await shop.learn({broken: 1}, first=20)
        await redis.hset(shop.keys.user(broken), "state", b"rubbish")
        passing.set()
        await shop.learn({sound: 1}, first=30)
        await watched.serves(sound, 2)

    async def test_undecodable_user_does_not_prevent_the_start(
        self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]
    ) -> None:
        await shop.learn({"broken": 1, "sound": 1})
        await redis.hset(shop.keys.user("broken"), "state", b"rubbish")
        watched = watch()
        await watched.replica.start()
        assert watched.version("sound") == 1


class TestEpochs:
    async def test_new_epoch_is_served(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        await publish_epoch(shop, 0, 0)
        watched = watch()
        await watched.replica.start()
        assert watched.model.epoch_number == 0
        await publish_epoch(shop, 1, 16)

        async def served() -> bool:
            return (watched.model.epoch_number, watched.model.epoch_events) == (1, 16)

        await soon(served)

    async def test_users_fitted_under_a_new_epoch_wait_for_it(
        self, shop: Workshop, watch: Callable[..., Watched]
    ) -> None:
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 1, "b": 1})
        watched = watch()
        await watched.replica.start()
        await move_to_epoch(shop, "a", 1)
        await shop.learn({"b": 1}, first=10)
        await watched.serves("b", 2)
        partition = shop.keys.partition_of("a")
        head = await shop.users.log_head(partition)

        async def read() -> bool:
            return watched.replica._cursors[partition] == head

        await soon(read)
        await watched.serves("a", 1, epoch=0)
        await publish_epoch(shop, 1, 16)
        await watched.serves("a", 1, epoch=1)

    async def test_wait_for_an_event_under_a_later_epoch(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        await publish_epoch(shop, 0, 0)
        watched = watch()
        await watched.replica.start()
        await shop.learn({"a": 1})
        await watched.serves("a", 1)
        come, passing = hold_load(watched.users, "a")
        await shop.learn({"a": 1}, first=10)
        entry = await last_entry(shop, "a")
        await come.wait()
        await shop.learn({"a": 1}, first=20)
        later = await last_entry(shop, "a")
        await move_to_epoch(shop, "a", 1)
        passing.set()
        assert await watched.replica.wait_applied(*entry, 5.0)
        assert not await watched.replica.wait_applied(*later, 0.1)
        await publish_epoch(shop, 1, 16)
        assert await watched.replica.wait_applied(*later, 5.0)
        await watched.serves("a", 3, epoch=1)

    async def test_pool_members_are_loaded_with_the_epoch(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 1, "b": 1, "c": 1})
        watched = watch(pool=1)
        await watched.replica.start()
        await publish_epoch(shop, 1, 3, members=("b", "c"))
        await watched.serves("b", 1)
        await watched.serves("c", 1)

    async def test_user_refitted_while_the_epoch_is_adopted(
        self, shop: Workshop, watch: Callable[..., Watched]
    ) -> None:
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 1})
        watched = watch()
        await watched.replica.start()
        come, passing = hold_load(watched.users, "a")
        await publish_epoch(shop, 1, 16)
        await come.wait()  # the adoption has read a's state of the old epoch
        await move_to_epoch(shop, "a", 1)

        async def deferred() -> bool:
            return "a" in watched.replica._deferred

        await soon(deferred)
        passing.set()
        await watched.serves("a", 1, epoch=1)

    async def test_user_loaded_while_the_epoch_of_a_refit_is_adopted(
        self, shop: Workshop, watch: Callable[..., Watched]
    ) -> None:
        """The state that the refit replaced is served, but not under the new epoch."""
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 1})
        watched = watch(pool=1)
        await watched.replica.start()
        await shop.learn({"b": 1})
        for user in ("a", "b"):
            await move_to_epoch(shop, user, 1, refit=1)
        heads = {partition: await shop.users.log_head(partition) for partition in range(shop.record.partitions)}

        async def read() -> bool:
            return heads.items() <= watched.replica._cursors.items()

        await soon(read)
        come, passing = hold_load(watched.users, "a")
        await publish_epoch(shop, 1, 16)
        await come.wait()
        await watched.replica.refresh("b")
        await watched.serves("b", 1, epoch=0)
        passing.set()
        await watched.serves("b", 1, epoch=1)

    async def test_epoch_adopted_while_a_replaced_state_is_loaded(
        self, shop: Workshop, watch: Callable[..., Watched]
    ) -> None:
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 1})
        watched = watch(pool=1)
        await watched.replica.start()
        await shop.learn({"b": 1})
        await move_to_epoch(shop, "b", 1, refit=1)
        load_replaced = watched.users.load_replaced

        async def late(refitted: Collection[UserState]) -> dict[str, UserState]:
            found = await load_replaced(refitted)
            if refitted:
                await publish_epoch(shop, 1, 16)
                await soon(lambda: watched.replica.wait_epoch(1, 0.1))
            return found

        watched.users.load_replaced = late  # type: ignore[method-assign]
        await watched.replica.refresh("b")
        held = watched.model.holds("b")
        assert held is not None
        assert held.epoch == 1

    async def test_next_refit_begins_before_an_epoch_is_adopted(
        self, shop: Workshop, watch: Callable[..., Watched]
    ) -> None:
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 1})
        watched = watch()
        await watched.replica.start()
        come, passing = hold_load(watched.users, "a")
        await move_to_epoch(shop, "a", 1, refit=1)
        await come.wait()  # the replica reads no more of the log
        await move_to_epoch(shop, "a", 2, refit=2)
        await publish_epoch(shop, 1, 16)
        passing.set()
        await watched.serves("a", 1, epoch=1)


class TestWaiting:
    async def test_true_once_the_event_is_served(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        [stored] = await shop.streams.enqueue([make_event("a", 1)])
        waiting = asyncio.create_task(watched.replica.wait_applied(stored.partition, stored.entry_id, 5.0))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        deliveries = await shop.streams.read([stored.partition], "c1", count=1, block_ms=10)
        await shop.publisher().publish(stored.partition, deliveries)
        assert await waiting
        assert watched.version("a") == 1
        assert await watched.replica.wait_applied(stored.partition, stored.entry_id, 5.0)
        assert watched.replica._done.awaited == 0

    async def test_false_after_the_timeout(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        waits = [watched.replica.wait_applied(0, f"{number}-0", 0.02) for number in (1, 2, 2, 3)]
        async with asyncio.timeout(30):
            assert await asyncio.gather(*waits) == [False] * 4
        assert watched.replica._done.awaited == 0

    async def test_the_epoch_that_the_event_makes_due_is_not_waited_for(
        self, shop: Workshop, watch: Callable[..., Watched]
    ) -> None:
        await publish_epoch(shop, 0, 0)
        watched = watch()
        await watched.replica.start()
        await shop.learn({"a": 16})
        assert await watched.replica.wait_applied(*await last_entry(shop, "a"), 30.0)
        assert (watched.version("a"), watched.model.epoch_number) == (16, 0)

    async def test_timed_out_waiter_does_not_affect_others(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        [stored] = await shop.streams.enqueue([make_event("a", 1)])
        entry = (stored.partition, stored.entry_id)
        patient = asyncio.create_task(watched.replica.wait_applied(*entry, 5.0))
        assert not await watched.replica.wait_applied(*entry, 0.02)
        await shop.publisher().publish(
            stored.partition, await shop.streams.read([stored.partition], "c1", count=1, block_ms=10)
        )
        assert await patient
