"""EpochTrainer: epochs are published when due, each on top of its predecessor, with all users fitted under them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from threading import Event
from typing import Any

import numpy as np
import pytest
import redis as sync_redis
from structlog.testing import capture_logs

from metaban.store.client.connection import pipeline
from metaban.store.errors import StoreError
from metaban.store.shared.epochs import Epoch
from metaban.store.users.records import UserState
from metaban.worker.epochs import epoch_trainer as meta_module
from metaban.worker.epochs.derive_shared import choose_by_hash, derive_shared
from metaban.worker.epochs.epoch_trainer import EpochTrainer
from metaban.worker.learning.trainer import FitInput
from tests.valkeys import ask_every_server, block_until_renewed
from tests.worker.epochs.epoch_checks import all_users_are_fitted, before_first, current, epochs_of_users, published
from tests.worker.workshop import OpenWorkshop, Workshop, small_paper, soon

#: The applied events at which inputs are first standardised.
FIRST = 16


class TestPublishing:
    async def test_the_first_epoch_is_the_initial_state(self, shop: Workshop) -> None:
        await shop.epoch_trainer().tick()
        epoch = await current(shop)
        trainer = shop.model.trainer
        assert trainer is not None
        assert (epoch.number, epoch.events, epoch.members) == (0, 0, ())
        for name, tensor in trainer.learner.initial_shared().items():
            np.testing.assert_array_equal(epoch.tensors[name], tensor.numpy())
        await shop.epoch_trainer().tick()
        assert await published(shop) == [0]

    async def test_no_epoch_before_the_layout_is_set(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(fixed=False)
        await shop.epoch_trainer().tick()
        assert await shop.epochs.current() is None

    async def test_inputs_are_standardised_at_sixteen_events(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(partitions=3, samples_kept=50)
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 5, "b": 7, "c": 3})
        before = await shop.versions()
        await meta.tick()
        assert await published(shop) == [0], "15 events make no epoch due"
        await shop.learn({"d": 1}, first=100)
        await meta.tick()
        epoch = await current(shop)
        assert (epoch.number, epoch.events) == (1, FIRST)
        samples = await shop.users.load_samples([*before, "d"])
        rows = np.array([sample.features for kept in samples.values() for sample in kept], dtype=np.float64)
        assert len(rows) == FIRST
        np.testing.assert_allclose(epoch.tensors["mean"], rows.mean(0), rtol=1e-5)
        np.testing.assert_allclose(epoch.tensors["scale"], rows.std(0), rtol=1e-5)
        assert await shop.versions() == {**before, "d": 1}
        await all_users_are_fitted(shop, 1)
        await meta.tick()
        assert await published(shop) == [0, 1]

    async def test_inputs_are_standardised_again_at_every_doubling(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        total = 0
        for more in (16, 8, 7, 1, 31, 1):
            await shop.learn({f"user {total}": more}, first=total)
            total += more
            await meta.tick()
        assert total == 64
        assert await published(shop) == [0, 1, 2, 3]
        assert (await current(shop)).events == 64
        await all_users_are_fitted(shop, 3)

    async def test_users_are_fitted_before_the_epoch_is_published(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 8, "b": 8})
        seen: list[dict[str, int]] = []

        async def look() -> None:
            assert await shop.epoch_number() == 0
            seen.append(await epochs_of_users(shop))

        before_first(shop.epochs, "publish", look)
        await meta.tick()
        assert seen == [{"a": 1, "b": 1}]
        assert (await current(shop)).number == 1

    async def test_rebased_users_are_logged_for_replicas_without_events(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 16})
        head = await shop.users.log_head(0)
        await meta.tick()
        news = await shop.users.tail(0, head, block_ms=1, count=10)
        assert [(entry.user_id, entry.version, entry.entry_ids) for entry in news] == [("a", 16, ())]

    async def test_epochs_that_change_no_inputs_do_not_refit_users(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(settings=small_paper(preset="pooled", standardize=False, epoch_events=4))
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 5})
        await meta.tick()
        assert (await current(shop)).number == 1
        assert await epochs_of_users(shop) == {"a": 0}

    async def test_an_epoch_that_is_not_finite_is_never_published(self, open_workshop: OpenWorkshop) -> None:
        """All users and later epochs build on it, so it could never be repaired."""
        shop = await open_workshop(
            settings=small_paper(preset="pooled", meta_rate=10.0, input_norm=1e3, meta_steps=30, epoch_events=4)
        )
        meta = shop.epoch_trainer()
        await meta.tick()
        before = await current(shop)
        await shop.learn({"a": 5})
        await meta.tick()
        epoch = await current(shop)
        assert (epoch.number, epoch.events) == (1, 5), "otherwise it would be derived again and again"
        for name, array in before.tensors.items():
            np.testing.assert_array_equal(epoch.tensors[name], array)
        assert (await shop.users.counters())["quarantined"] == 0


class TestConcurrentUpdates:
    async def test_a_user_updated_during_the_refit_is_fitted_again_afterwards(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 8, "b": 8})
        before_first(shop.epochs, "publish", lambda: shop.learn({"a": 2}, first=50))
        await meta.tick()
        assert await shop.versions() == {"a": 10, "b": 8}
        await all_users_are_fitted(shop, 1)

    async def test_users_not_refitted_by_a_dead_trainer_are_fitted_by_the_next(self, shop: Workshop) -> None:
        first = shop.epoch_trainer("first")
        await first.tick()
        await shop.learn({"a": 8, "b": 8})
        # An event is fitted under the old epoch by a process that does not know the new one yet ...
        stale = await shop.users.load(["a"])
        await first.tick()
        old = UserState("a", 0, 8, 0, stale["a"].tensors)
        await shop.redis.hset(shop.keys.user("a"), mapping={"epoch": 0, "state": old.encode()})
        # ... and the sweep is not finished: the next trainer, in another process, checks for itself.
        await shop.epoch_trainer("second", model=shop.new_model()).tick()
        await all_users_are_fitted(shop, 1)
        assert await shop.versions() == {"a": 8, "b": 8}

    async def test_users_fitted_under_an_unpublished_epoch_are_fitted_again(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 8, "b": 8})
        before_first(shop.epochs, "publish", lambda: shop.redis.set(shop.keys.lease, "another"))
        await meta.tick()
        assert await epochs_of_users(shop) == {"a": 1, "b": 1}
        # The next epoch of that number is a different one, derived from more events.
        await shop.redis.delete(shop.keys.lease)
        await shop.learn({"c": 8}, first=50)
        await meta.tick()
        await all_users_are_fitted(shop, 1)

    async def test_a_delayed_trainer_does_not_overwrite_a_later_one(self, shop: Workshop) -> None:
        slow = shop.epoch_trainer("slow", users=(watched := shop.user_store()))
        await slow.tick()
        await shop.learn({"a": 8, "b": 8})

        async def overtake() -> None:
            await shop.redis.delete(shop.keys.lease)  # it expired
            await shop.learn({"c": 8}, first=50)
            await shop.epoch_trainer("quick", model=shop.new_model()).tick()

        before_first(watched, "rebase", overtake)
        await slow.tick()
        assert await published(shop) == [0, 1]
        # Under the published epoch, which is derived from more events than the unpublished one.
        await all_users_are_fitted(shop, 1)

    async def test_a_user_created_during_the_refit_is_fitted_afterwards(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 16})
        before_first(shop.epochs, "publish", lambda: shop.learn({"newcomer": 2}, first=50))
        await meta.tick()
        assert await shop.versions() == {"a": 16, "newcomer": 2}
        await all_users_are_fitted(shop, 1)

    async def test_an_update_between_load_and_rebase_is_kept(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer(users=(watched := shop.user_store()))
        await meta.tick()
        await shop.learn({"a": 8, "b": 8})
        before_first(watched, "rebase", lambda: shop.learn({"a": 1}, first=50))
        await meta.tick()
        assert await shop.versions() == {"a": 9, "b": 8}
        assert len((await shop.users.load_samples(["a"]))["a"]) == shop.samples_kept
        await all_users_are_fitted(shop, 1)

    async def test_more_users_than_one_chunk(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(meta_module, "REFIT_USERS", 3)
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({f"user {number}": 2 for number in range(10)})
        await meta.tick()
        await all_users_are_fitted(shop, 1)


def refusals(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Reasons of epochs that were not published."""
    return [line["reason"] for line in logs if line["event"] == "epoch_refused"]


class TestLease:
    async def test_nothing_is_published_while_another_holds_it(self, shop: Workshop) -> None:
        assert await shop.epochs.acquire_lease("another", 60_000)
        await shop.epoch_trainer().tick()
        assert await shop.epochs.current() is None
        assert await shop.redis.get(shop.keys.lease) == b"another", "the lease of the other trainer is not released"

    async def test_released_after_use(self, shop: Workshop) -> None:
        await shop.epoch_trainer().tick()
        assert await shop.redis.get(shop.keys.lease) is None

    async def test_nothing_is_published_when_lost_before_the_refit(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer(users=(watched := shop.user_store()))
        await meta.tick()
        await shop.learn({"a": 16})
        before_first(watched, "load_samples", lambda: shop.redis.set(shop.keys.lease, "another"))
        with capture_logs() as logs:
            await meta.tick()
        assert refusals(logs) == ["the lease was lost while users were refitted"]
        assert await published(shop) == [0]
        assert await epochs_of_users(shop) == {"a": 0}

    async def test_nothing_is_published_when_lost_before_the_publication(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 16})
        before_first(shop.epochs, "publish", lambda: shop.redis.set(shop.keys.lease, "another"))
        with capture_logs() as logs:
            await meta.tick()
        assert refusals(logs) == ["the lease was lost while the epoch was derived"]
        assert await published(shop) == [0]
        await shop.redis.delete(shop.keys.lease)
        await meta.tick()
        assert await published(shop) == [0, 1]
        await all_users_are_fitted(shop, 1)

    @pytest.mark.single_node("the blocked event loop watches one server")
    async def test_a_derivation_longer_than_the_lease_is_published(self, shop: Workshop, valkey_url: str) -> None:
        """Otherwise a namespace with long derivations would never get another epoch, even if they block the loop."""
        meta = shop.epoch_trainer(users=(watched := shop.user_store()))
        await meta.tick()
        await shop.learn({"a": 16})

        async def block() -> None:
            with sync_redis.Redis.from_url(valkey_url) as store:
                block_until_renewed(store, shop.keys.lease, times=3)

        before_first(watched, "load_samples", block)
        await meta.tick()
        assert await published(shop) == [0, 1]

    async def test_a_failed_renewal_is_seen(self, shop: Workshop, compute: Executor) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 16})
        free = Event()
        compute.submit(free.wait, 60)
        with capture_logs() as logs:
            working = asyncio.create_task(meta.tick())

            async def leased() -> bool:
                return bool(await shop.redis.exists(shop.keys.lease))

            async def failed() -> bool:
                return "lease_renewal_failed" in [line["event"] for line in logs]

            await soon(leased)
            await shop.redis.delete(shop.keys.lease)
            await shop.redis.rpush(shop.keys.lease, "not a lease")
            await soon(failed)
        free.set()
        with pytest.raises(StoreError):
            await working
        assert await published(shop) == [0]

    async def test_two_trainers_publish_each_number_once(self, shop: Workshop) -> None:
        metas = [shop.epoch_trainer(f"m{number}", model=shop.new_model()) for number in range(3)]
        await asyncio.gather(*(meta.tick() for meta in metas))
        for total in (16, 32, 64):
            await shop.learn({f"user {total}": total - sum((await shop.versions()).values())}, first=total)
            async with asyncio.timeout(30):
                await asyncio.gather(*(meta.tick() for meta in metas))
        assert await published(shop) == [0, 1, 2, 3]
        await all_users_are_fitted(shop, 3)

    async def test_two_trainers_that_both_believe_to_hold_it_publish_each_number_once(self, shop: Workshop) -> None:
        """The fence of the epoch makes it safe, not the lease, which depends on clocks."""
        one, other = shop.epoch_trainer("m", model=shop.new_model()), shop.epoch_trainer("m", model=shop.new_model())
        await asyncio.gather(one.tick(), other.tick())
        await shop.learn({"a": 16})
        await asyncio.gather(one.tick(), other.tick())
        await one.tick()  # each may have kept the other from publishing
        assert await published(shop) == [0, 1]
        await all_users_are_fitted(shop, 1)


class TestPool:
    async def test_below_its_size_it_holds_all_users(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer(pool=4)
        await meta.tick()
        await shop.learn({f"user {number}": 4 for number in range(4)})
        await meta.tick()
        assert (await current(shop)).members == ()

    async def test_above_its_size_its_members_are_published(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer(pool=4)
        await meta.tick()
        await shop.learn({f"user {number}": 1 for number in range(6)})
        await meta.tick()
        epoch = await current(shop)
        assert epoch.number == 1
        assert len(set(epoch.members)) == 4
        assert set(epoch.members) <= set(await shop.versions())
        await meta.tick()
        assert await published(shop) == [0, 1], "the pool is full: nothing is due"
        await shop.learn({f"user {number}": 1 for number in range(6, 16)}, first=50)
        await meta.tick()
        assert await published(shop) == [0, 1, 2]
        assert len((await current(shop)).members) == 4
        await all_users_are_fitted(shop, 2)


class TestManyUsers:
    async def open(self, shop: Workshop, users: int) -> None:
        """A namespace at epoch 0 with users of one event each, written without states: quick."""
        trainer = shop.model.trainer
        assert trainer is not None
        names = [f"user {number}" for number in range(users)]
        for start in range(0, users, 5_000):
            flat = [part for name in names[start : start + 5_000] for part in (name, "0:1")]
            await pipeline(shop.redis, [("HSET", shop.keys.versions(0), *flat)])
        await shop.redis.hset(shop.keys.counters(0), "applied", 2_000)
        arrays = {name: tensor.numpy() for name, tensor in trainer.learner.initial_shared().items()}
        assert await shop.epochs.acquire_lease("test", 60_000)
        assert await shop.epochs.publish(Epoch(0, 2_000, arrays, (), 0), lease_token="test")
        assert await shop.epochs.release_lease("test")

    async def calls(self, shop: Workshop) -> dict[str, int]:
        """Commands that the server has executed."""
        found = await shop.redis.info("commandstats")
        return {name.removeprefix("cmdstat_"): counts["calls"] for name, counts in found.items()}

    @pytest.mark.single_node("counts the commands of one server")
    async def test_an_epoch_reads_only_what_changed(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(meta_module, "EPOCH_USERS_MAX", 50)
        await self.open(shop, 20_000)
        meta = shop.epoch_trainer(pool=50)
        read: list[dict[str, int]] = []
        for number in range(1, 4):
            await shop.learn({f"active {user}": 1 for user in range(100)}, first=1_000 * number)
            before = await self.calls(shop)
            await meta.tick()
            after = await self.calls(shop)
            assert (await current(shop)).number == number
            read.append({name: after.get(name, 0) - before.get(name, 0) for name in ("hscan", "xrange")})
        assert read[0]["hscan"] >= 20
        assert read[1:] == [{"hscan": 0, "xrange": 2}] * 2, "later epochs read the lines of the log, and their end"

    @pytest.mark.single_node("counts the commands of one server")
    async def test_a_pool_with_room_for_forgotten_users_is_checked_cheaply(self, shop: Workshop) -> None:
        """Nothing is due, and the records of forgotten users are more than the pool holds."""
        await shop.learn({"a": 1, "b": 1, "c": 1})
        await shop.users.forget("a")
        meta = shop.epoch_trainer(pool=2)
        await meta.tick()
        await meta.tick()
        before = await self.calls(shop)
        await meta.tick()
        after = await self.calls(shop)
        assert await published(shop) == [0]
        assert after["hscan"] == before["hscan"]

    async def test_epochs_equal_those_of_a_sort_of_all_users(
        self, open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(meta_module, "EPOCH_USERS_MAX", 12)
        shop = await open_workshop(partitions=3)
        meta = shop.epoch_trainer(pool=5)
        await meta.tick()
        for number in range(1, 4):
            await shop.learn(
                {f"user {user}": 1 + user % 3 for user in range(10 * number, 10 * number + 30)}, first=100 * number
            )
            if number > 1:
                await shop.users.forget(choose_by_hash(list(await shop.versions()), 1)[0])
            await shop.model.refresh_epoch()
            before, trainer = shop.model.epoch, shop.model.trainer
            assert trainer is not None
            everyone = [user for user, version in (await shop.versions()).items() if version]
            chosen = choose_by_hash(everyone, 12)
            samples = await shop.users.load_samples(chosen)
            fit_inputs = [FitInput(user, 0, samples[user], None) for user in chosen]
            total = sum((await shop.users.applied()).values())
            expected = derive_shared(trainer, before.tensors, fit_inputs, before.events, total)
            await meta.tick()
            epoch = await current(shop)
            assert (epoch.number, epoch.members) == (number, tuple(choose_by_hash(everyone, 5)))
            for name, tensor in expected.items():
                np.testing.assert_array_equal(epoch.tensors[name], tensor.numpy(), err_msg=name)


class TestRunning:
    async def start(self, meta: EpochTrainer) -> asyncio.Task[None]:
        return asyncio.create_task(meta.run())

    async def stop(self, shop: Workshop, running: asyncio.Task[None]) -> None:
        shop.stopping.set()
        async with asyncio.timeout(30):
            await running

    async def test_applied_events_wake_it(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        running = await self.start(meta := shop.epoch_trainer())
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
        running = await self.start(shop.epoch_trainer())
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
        """An error here would also stop the consumers."""
        monkeypatch.setattr(meta_module, "TICK_S", 0.01)
        running = await self.start(shop.epoch_trainer())
        await soon(lambda: self.at(shop, 0))
        await shop.learn({"a": 8, "b": 8})
        good = await shop.redis.lrange(shop.keys.samples("a"), 0, -1)
        await shop.redis.lset(shop.keys.samples("a"), 0, b"rubbish")
        await asyncio.sleep(0.1)
        assert not running.done()
        await shop.redis.lset(shop.keys.samples("a"), 0, good[0])
        await soon(lambda: self.at(shop, 1))
        await self.stop(shop, running)

    async def test_a_stop_does_not_wait_for_epochs_that_have_not_begun(
        self, open_workshop: OpenWorkshop, compute: Executor
    ) -> None:
        """All namespaces share one thread: a worker with many of them would not end in time."""
        shops = [await open_workshop(name=f"shop-{number}") for number in range(3)]
        for shop in shops:
            await shop.epoch_trainer().tick()
            await shop.learn({"a": FIRST})
        free = Event()
        compute.submit(free.wait, 60)
        running = [asyncio.create_task(shop.epoch_trainer().run()) for shop in shops]

        async def all_have_leases() -> bool:
            return all([await shop.redis.get(shop.keys.lease) == b"m1" for shop in shops])

        await soon(all_have_leases)
        for shop in shops:
            shop.stopping.set()
        free.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*running)
        for shop in shops:
            assert await published(shop) == [0]
            assert await shop.redis.exists(shop.keys.lease) == 0
            shop.stopping.clear()
            await shop.epoch_trainer("m2").tick()
            assert await published(shop) == [0, 1], "the next worker derives it"
