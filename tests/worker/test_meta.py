"""Epochs: published when due, on top of the one they were derived from, with every user fitted under them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from threading import Event

import numpy as np
import pytest

from store.users import UserState
from tests.valkeys import ask_every_server
from tests.worker.conftest import OpenWorkshop
from tests.worker.epoch_checks import before_first, current, epochs_of_users, everyone_is_fitted, published
from tests.worker.workshop import Workshop, small, soon
from worker import meta as meta_module
from worker.meta import MetaTrainer

#: The applied events at which inputs are first standardised.
FIRST = 16


class TestPublishing:
    async def test_the_first_epoch_is_that_of_the_settings(self, shop: Workshop) -> None:
        await shop.meta()._tick()
        epoch = await current(shop)
        trainer = shop.model.trainer
        assert trainer is not None
        assert (epoch.number, epoch.events, epoch.members) == (0, 0, ())
        for name, tensor in trainer.learner.initial_shared().items():
            np.testing.assert_array_equal(epoch.tensors[name], tensor.numpy())
        await shop.meta()._tick()
        assert await published(shop) == [0]

    async def test_nothing_before_the_layout(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(fixed=False)
        await shop.meta()._tick()
        assert await shop.epochs.current() is None

    async def test_inputs_are_standardised_at_sixteen_events(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(partitions=3, samples_kept=50)
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 5, "b": 7, "c": 3})
        before = await shop.versions()
        await meta._tick()
        assert await published(shop) == [0], "15 events make no epoch due"
        await shop.learn({"d": 1}, first=100)
        await meta._tick()
        epoch = await current(shop)
        assert (epoch.number, epoch.events) == (1, FIRST)
        samples = await shop.users.load_samples([*before, "d"])
        rows = np.array([sample.features for kept in samples.values() for sample in kept], dtype=np.float64)
        assert len(rows) == FIRST
        np.testing.assert_allclose(epoch.tensors["mean"], rows.mean(0), rtol=1e-5)
        np.testing.assert_allclose(epoch.tensors["scale"], rows.std(0), rtol=1e-5)
        assert await shop.versions() == {**before, "d": 1}
        await everyone_is_fitted(shop, 1)
        await meta._tick()
        assert await published(shop) == [0, 1]

    async def test_then_at_every_doubling(self, shop: Workshop) -> None:
        meta = shop.meta()
        await meta._tick()
        total = 0
        for more in (16, 8, 7, 1, 31, 1):
            await shop.learn({f"user {total}": more}, first=total)
            total += more
            await meta._tick()
        assert total == 64
        assert await published(shop) == [0, 1, 2, 3]
        assert (await current(shop)).events == 64
        await everyone_is_fitted(shop, 3)

    async def test_users_are_fitted_before_the_epoch_is_published(self, shop: Workshop) -> None:
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 8, "b": 8})
        seen: list[dict[str, int]] = []

        async def look() -> None:
            assert await shop.epoch_number() == 0
            seen.append(await epochs_of_users(shop))

        before_first(shop.epochs, "publish", look)
        await meta._tick()
        assert seen == [{"a": 1, "b": 1}]
        assert (await current(shop)).number == 1

    async def test_rebased_users_are_logged_for_replicas_without_events(self, shop: Workshop) -> None:
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 16})
        head = await shop.users.log_head(0)
        await meta._tick()
        news = await shop.users.tail(0, head, block_ms=1, count=10)
        assert [(entry.user_id, entry.version, entry.entry_ids) for entry in news] == [("a", 16, ())]

    async def test_epochs_that_change_no_inputs_leave_users_alone(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(settings=small(preset="pooled", standardize=False, epoch_events=4))
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 5})
        await meta._tick()
        assert (await current(shop)).number == 1
        assert await epochs_of_users(shop) == {"a": 0}

    async def test_an_epoch_that_is_not_finite_is_never_published(self, open_workshop: OpenWorkshop) -> None:
        """Everyone starts from it, and later ones are derived from it: there would be no way back."""
        shop = await open_workshop(
            settings=small(preset="pooled", meta_rate=10.0, input_norm=1e3, meta_steps=30, epoch_events=4)
        )
        meta = shop.meta()
        await meta._tick()
        before = await current(shop)
        await shop.learn({"a": 5})
        await meta._tick()
        epoch = await current(shop)
        assert (epoch.number, epoch.events) == (1, 5), "or it would be derived over and over"
        for name, array in before.tensors.items():
            np.testing.assert_array_equal(epoch.tensors[name], array)
        assert (await shop.users.counters())["quarantined"] == 0


class TestMovingUsers:
    async def test_a_user_that_moves_during_the_refit_is_fitted_again_after(self, shop: Workshop) -> None:
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 8, "b": 8})
        before_first(shop.epochs, "publish", lambda: shop.learn({"a": 2}, first=50))
        await meta._tick()
        assert await shop.versions() == {"a": 10, "b": 8}
        await everyone_is_fitted(shop, 1)

    async def test_whoever_a_dead_trainer_left_behind_is_fitted_by_the_next(self, shop: Workshop) -> None:
        first = shop.meta("first")
        await first._tick()
        await shop.learn({"a": 8, "b": 8})
        # An event is fitted under the old epoch by a process that does not learn of the new one in time ...
        stale = await shop.users.load(["a"])
        await first._tick()
        old = UserState("a", 0, 8, 0, stale["a"].tensors)
        await shop.redis.hset(shop.keys.user("a"), mapping={"epoch": 0, "state": old.encode()})
        # ... and nobody ends the sweep: the next trainer, in another process, looks for itself.
        await shop.meta("second", model=shop.new_model())._tick()
        await everyone_is_fitted(shop, 1)
        assert await shop.versions() == {"a": 8, "b": 8}

    async def test_whoever_was_fitted_under_an_epoch_that_never_came_out_is_fitted_again(self, shop: Workshop) -> None:
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 8, "b": 8})
        before_first(shop.epochs, "publish", lambda: shop.redis.set(shop.keys.lease, "another"))
        await meta._tick()
        assert await epochs_of_users(shop) == {"a": 1, "b": 1}
        # The next epoch of that number is another one: more is known by then.
        await shop.redis.delete(shop.keys.lease)
        await shop.learn({"c": 8}, first=50)
        await meta._tick()
        await everyone_is_fitted(shop, 1)

    async def test_a_trainer_that_was_held_up_writes_nothing_over_a_later_one(self, shop: Workshop) -> None:
        slow = shop.meta("slow", users=(watched := shop.user_store()))
        await slow._tick()
        await shop.learn({"a": 8, "b": 8})

        async def overtake() -> None:
            await shop.redis.delete(shop.keys.lease)  # it ran out
            await shop.learn({"c": 8}, first=50)
            await shop.meta("quick", model=shop.new_model())._tick()

        before_first(watched, "rebase", overtake)
        await slow._tick()
        assert await published(shop) == [0, 1]
        # Under the epoch that came out, which knows of more than the one that did not.
        await everyone_is_fitted(shop, 1)

    async def test_a_user_that_is_new_since_the_refit_is_fitted_after(self, shop: Workshop) -> None:
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 16})
        before_first(shop.epochs, "publish", lambda: shop.learn({"newcomer": 2}, first=50))
        await meta._tick()
        assert await shop.versions() == {"a": 16, "newcomer": 2}
        await everyone_is_fitted(shop, 1)

    async def test_a_user_that_moves_between_load_and_rebase_keeps_the_move(self, shop: Workshop) -> None:
        meta = shop.meta(users=(watched := shop.user_store()))
        await meta._tick()
        await shop.learn({"a": 8, "b": 8})
        before_first(watched, "rebase", lambda: shop.learn({"a": 1}, first=50))
        await meta._tick()
        assert await shop.versions() == {"a": 9, "b": 8}
        assert len((await shop.users.load_samples(["a"]))["a"]) == shop.samples_kept
        await everyone_is_fitted(shop, 1)

    async def test_more_users_than_one_chunk(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(meta_module, "REFIT_USERS", 3)
        meta = shop.meta()
        await meta._tick()
        await shop.learn({f"user {number}": 2 for number in range(10)})
        await meta._tick()
        await everyone_is_fitted(shop, 1)


class TestLease:
    async def test_held_by_another_nothing_is_published(self, shop: Workshop) -> None:
        assert await shop.epochs.acquire_lease("another", 60_000)
        await shop.meta()._tick()
        assert await shop.epochs.current() is None
        assert await shop.redis.get(shop.keys.lease) == b"another", "and the lease is not given back for them"

    async def test_given_back_after_use(self, shop: Workshop) -> None:
        await shop.meta()._tick()
        assert await shop.redis.get(shop.keys.lease) is None

    async def test_lost_before_the_refit_nothing_is_published(self, shop: Workshop) -> None:
        meta = shop.meta(users=(watched := shop.user_store()))
        await meta._tick()
        await shop.learn({"a": 16})
        before_first(watched, "load_samples", lambda: shop.redis.set(shop.keys.lease, "another"))
        await meta._tick()
        assert await published(shop) == [0]
        assert await epochs_of_users(shop) == {"a": 0}

    async def test_lost_before_the_publication_nothing_is_published(self, shop: Workshop) -> None:
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 16})
        before_first(shop.epochs, "publish", lambda: shop.redis.set(shop.keys.lease, "another"))
        await meta._tick()
        assert await published(shop) == [0]
        await shop.redis.delete(shop.keys.lease)
        await meta._tick()
        assert await published(shop) == [0, 1]
        await everyone_is_fitted(shop, 1)

    async def test_a_derivation_longer_than_the_lease_is_published(
        self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise a namespace that takes long to derive would never see another epoch."""
        monkeypatch.setattr(meta_module, "TRAINER_LEASE_MS", 90)
        meta = shop.meta()
        await meta._tick()
        await shop.learn({"a": 16})
        free = Event()
        compute.submit(free.wait, 10)
        working = asyncio.create_task(meta._tick())
        await asyncio.sleep(0.4)
        assert await shop.redis.get(shop.keys.lease) == b"m1"
        free.set()
        await working
        assert await published(shop) == [0, 1]

    async def test_two_trainers_publish_each_number_once(self, shop: Workshop) -> None:
        metas = [shop.meta(f"m{number}", model=shop.new_model()) for number in range(3)]
        await asyncio.gather(*(meta._tick() for meta in metas))
        for total in (16, 32, 64):
            await shop.learn({f"user {total}": total - sum((await shop.versions()).values())}, first=total)
            async with asyncio.timeout(30):
                await asyncio.gather(*(meta._tick() for meta in metas))
        assert await published(shop) == [0, 1, 2, 3]
        await everyone_is_fitted(shop, 3)

    async def test_even_when_both_believe_to_hold_the_lease(self, shop: Workshop) -> None:
        """The number is what makes it safe: a lease is a clock's opinion."""
        one, other = shop.meta("m", model=shop.new_model()), shop.meta("m", model=shop.new_model())
        await asyncio.gather(one._tick(), other._tick())
        await shop.learn({"a": 16})
        await asyncio.gather(one._tick(), other._tick())
        await one._tick()  # each may have kept the other from publishing
        assert await published(shop) == [0, 1]
        await everyone_is_fitted(shop, 1)


class TestPool:
    async def test_below_its_size_everyone_is_in_it(self, shop: Workshop) -> None:
        meta = shop.meta(pool=4)
        await meta._tick()
        await shop.learn({f"user {number}": 4 for number in range(4)})
        await meta._tick()
        assert (await current(shop)).members == ()

    async def test_above_its_size_its_members_are_published(self, shop: Workshop) -> None:
        meta = shop.meta(pool=4)
        await meta._tick()
        await shop.learn({f"user {number}": 1 for number in range(6)})
        await meta._tick()
        epoch = await current(shop)
        assert epoch.number == 1
        assert len(set(epoch.members)) == 4
        assert set(epoch.members) <= set(await shop.versions())
        await meta._tick()
        assert await published(shop) == [0, 1], "the pool is full: nothing is due"
        await shop.learn({f"user {number}": 1 for number in range(6, 16)}, first=50)
        await meta._tick()
        assert await published(shop) == [0, 1, 2]
        assert len((await current(shop)).members) == 4
        await everyone_is_fitted(shop, 2)


class TestRunning:
    async def start(self, meta: MetaTrainer) -> asyncio.Task[None]:
        return asyncio.create_task(meta.run())

    async def stop(self, shop: Workshop, running: asyncio.Task[None]) -> None:
        shop.stopping.set()
        async with asyncio.timeout(30):
            await running

    async def test_applied_events_wake_it(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        running = await self.start(meta := shop.meta())
        await soon(lambda: self.at(shop, 0))
        monkeypatch.setattr(meta_module, "TICK_S", 60)
        await asyncio.sleep(0)
        await shop.learn({"a": FIRST})
        meta.count(0, FIRST)
        await soon(lambda: self.at(shop, 1))
        monkeypatch.setattr(meta_module, "TICK_S", 0.01)
        meta.count(0, 2 * FIRST)
        await self.stop(shop, running)

    async def at(self, shop: Workshop, number: int) -> bool:
        return await shop.epoch_number() == number

    async def test_it_survives_an_outage(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(meta_module, "TICK_S", 0.01)
        running = await self.start(shop.meta())
        await soon(lambda: self.at(shop, 0))
        for _ in range(20):
            await ask_every_server(shop.redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.005)
        await shop.learn({"a": FIRST})
        await soon(lambda: self.at(shop, 1))
        await self.stop(shop, running)

    async def test_a_record_it_cannot_read_does_not_end_it(
        self, shop: Workshop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Consumers share its fate, and with it all learning would end."""
        monkeypatch.setattr(meta_module, "TICK_S", 0.01)
        running = await self.start(shop.meta())
        await soon(lambda: self.at(shop, 0))
        await shop.learn({"a": 8, "b": 8})
        good = await shop.redis.lrange(shop.keys.samples("a"), 0, -1)
        await shop.redis.lset(shop.keys.samples("a"), 0, b"rubbish")
        await asyncio.sleep(0.1)
        assert not running.done()
        await shop.redis.lset(shop.keys.samples("a"), 0, good[0])
        await soon(lambda: self.at(shop, 1))
        await self.stop(shop, running)
