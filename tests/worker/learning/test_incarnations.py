"""An event counts only for the incarnation of its user that it was decided for."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import numpy as np
import pytest

from metaban.store.shared.epochs import Epoch
from metaban.store.users.users import UserStore
from metaban.worker.epochs.sample_cache import SampleCache
from tests.worker import workshop
from tests.worker.workshop import INPUTS, NO_NOTES, OpenWorkshop, Workshop, make_event, small_default, small_paper, soon


async def sums(shop: Workshop) -> dict[str, int]:
    """The counters; checks that they add up."""
    counters = await shop.users.counters()
    finished = counters["applied"] + counters["voided"] + counters["buried"]
    assert counters["enqueued"] + counters["replayed"] == finished + await shop.streams.backlog()
    assert counters["applied"] == sum((await shop.versions()).values()) + counters["forgotten"]
    return counters


async def publish(shop: Workshop, *events: Any, consumer: str = "c1") -> int | None:
    return await shop.publisher(consumer).publish(0, await shop.give(events, consumer))


def forgetful(shop: Workshop, user: str, *, times: int = 1) -> UserStore:
    """A user store that forgets a user right before an apply."""
    store, left = shop.user_store(), iter(range(times))
    apply = store.apply

    async def after_forgetting(*arguments: Any) -> int:
        if next(left, None) is not None:
            await shop.users.forget(user)
        return await apply(*arguments)

    store.apply = after_forgetting  # type: ignore[method-assign]
    return store


class TestVoid:
    async def test_events_of_an_earlier_incarnation_have_no_effect(self, shop: Workshop) -> None:
        await shop.learn({"a": 2, "b": 1})
        deliveries = await shop.give([make_event("a", 10), make_event("b", 11), make_event("a", 12)])
        await shop.users.forget("a")
        assert await shop.publisher().publish(0, deliveries) == 4
        assert await shop.users.versions(0) == {"a": (1, 0), "b": (0, 2)}
        assert await shop.users.load_samples(["a"]) == {}
        counters = await sums(shop)
        assert (counters["applied"], counters["voided"], counters["forgotten"]) == (4, 2, 2)
        assert await shop.pending() == await shop.streams.backlog() == 0

    async def test_a_batch_of_void_events(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 1)])
        await shop.users.forget("a")
        assert await shop.publisher().publish(0, deliveries) == 0
        assert (await sums(shop))["voided"] == 1
        assert await shop.streams.backlog() == 0

    async def test_void_and_valid_events_in_one_batch(self, shop: Workshop) -> None:
        await shop.learn({"a": 3})
        await shop.streams.enqueue([make_event("a", 10)])
        await shop.users.forget("a")
        await publish(shop, make_event("a", 11, incarnation=1), make_event("a", 12, incarnation=1))
        assert await shop.users.versions(0) == {"a": (1, 2)}
        samples = (await shop.users.load_samples(["a"]))["a"]
        assert [sample.arm_id for sample in samples] == ["11", "12"]
        assert (await sums(shop))["voided"] == 1

    async def test_an_event_of_an_incarnation_that_the_store_has_lost(self, shop: Workshop) -> None:
        [refused] = await shop.streams.enqueue([make_event("a", 1, incarnation=5)])
        assert refused.status == "void"
        await shop.redis.xadd(shop.keys.events(0), make_event("a", 1, incarnation=5).encode())  # from before the loss
        await publish(shop, make_event("b", 2))
        assert await shop.versions() == {"b": 1}
        assert (await shop.users.counters())["voided"] == 1

    @pytest.mark.parametrize("learner", ["default", "paper, latest", "paper, uniform"])
    async def test_a_forgotten_user_starts_as_a_new_user(self, open_workshop: OpenWorkshop, learner: str) -> None:
        _, _, draw = learner.partition(", ")
        shop = await open_workshop(settings=small_paper(draw=draw) if draw else small_default())
        await shop.learn({"a": 4})
        await shop.users.forget("a")
        noted = {"phi": NO_NOTES} if draw else {}
        await publish(shop, make_event("a", 50, incarnation=1, **noted))
        await publish(shop, make_event("b", 50, **noted))
        states = await shop.users.load(["a", "b"])
        assert (states["a"].incarnation, states["a"].version) == (1, 1)
        for name, array in states["b"].tensors.items():
            if draw != "uniform":  # the draw of a checkpoint is a user's own
                np.testing.assert_array_equal(states["a"].tensors[name], array, err_msg=name)
            assert states["a"].tensors[name].shape == array.shape
        if draw == "uniform":
            assert states["a"].tensors["fits"] == 1


class TestRaces:
    async def test_forgotten_between_load_and_apply(self, shop: Workshop) -> None:
        await shop.learn({"a": 2})
        deliveries = await shop.give([make_event("a", 10), make_event("b", 11)])
        await shop.publisher(users=forgetful(shop, "a")).publish(0, deliveries)
        assert await shop.users.versions(0) == {"a": (1, 0), "b": (0, 1)}
        assert (await sums(shop))["voided"] == 1

    async def test_a_new_user_forgotten_between_load_and_apply(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 10)])
        await shop.publisher(users=forgetful(shop, "a")).publish(0, deliveries)
        assert await shop.users.versions(0) == {"a": (1, 0)}
        assert (await sums(shop))["voided"] == 1

    async def test_forgotten_repeatedly(self, shop: Workshop) -> None:
        """The other users of the batch do not wait: a void event causes no further fit."""
        deliveries = await shop.give([make_event("a", 10), make_event("b", 11)])
        await shop.publisher(users=forgetful(shop, "a", times=100)).publish(0, deliveries)
        assert await shop.versions() == {"a": 0, "b": 1}
        assert (await sums(shop))["voided"] == 1

    async def test_forgotten_before_users_are_fitted_again(self, shop: Workshop) -> None:
        """A late refit does not bring the user back."""
        await shop.learn({"a": 1})
        before = (await shop.users.load(["a"]))["a"]
        await shop.users.forget("a")
        assert await shop.users.rebase(0, [before]) == [False]
        assert (await shop.users.load(["a"]))["a"].forgotten


class TestEpochs:
    async def test_the_sample_cache_drops_forgotten_users(self, shop: Workshop) -> None:
        await shop.learn({"ada": 3, "bob": 2})
        cache = SampleCache(shop.users)
        assert len(await cache.load(await shop.users.versions(0), INPUTS)) == 2
        await shop.users.forget("ada")
        assert [fit_input.user_id for fit_input in await cache.load(await shop.users.versions(0), INPUTS)] == ["bob"]
        await publish(shop, make_event("ada", 70, incarnation=1))
        found = {
            fit_input.user_id: fit_input.samples for fit_input in await cache.load(await shop.users.versions(0), INPUTS)
        }
        assert [sample.arm_id for sample in found["ada"]] == ["70"]

    @pytest.mark.parametrize("preset", ["paper", "default"])
    async def test_epochs_and_refits_leave_forgotten_users_out(self, open_workshop: OpenWorkshop, preset: str) -> None:
        settings = small_paper() if preset == "paper" else small_default()
        shop = await open_workshop(settings=settings, samples_kept=50)
        trainer = shop.model.trainer
        assert trainer is not None
        meta = shop.epoch_trainer(pool=1)
        await meta.tick()
        phi = np.zeros(trainer.learner.noted, dtype=np.float32)
        events = [make_event(f"user {number % 4}", number, phi=phi) for number in range(16)]
        await publish(shop, *events)
        await shop.users.forget("user 1")
        await shop.users.forget("never seen")
        await meta.tick()
        epoch = await shop.epochs.current()
        assert epoch is not None
        assert epoch.number == 1
        states = await shop.users.load([f"user {number}" for number in range(4)])
        assert {user: state.epoch for user, state in states.items()} == {
            "user 0": 1,
            "user 1": 0,
            "user 2": 1,
            "user 3": 1,
        }
        assert states["user 1"].forgotten
        for _ in range(3):
            await meta.tick()
        assert await shop.epoch_number() == 1, "tombstones make no epoch due"

    async def test_a_pool_member_forgotten_during_the_derivation(self, shop: Workshop) -> None:
        """They are removed from the previous epoch; the new epoch does not bring them back."""
        meta = shop.epoch_trainer(pool=2)
        await meta.tick()
        await shop.learn({f"user {number}": 4 for number in range(4)})
        publish_epoch = shop.epochs.publish
        members: list[tuple[str, ...]] = []

        async def late(epoch: Epoch, *, lease_token: str) -> bool:
            members.append(epoch.members)
            await shop.users.forget(epoch.members[0])
            assert await shop.epochs.strike([epoch.members[0]]) == 0
            return await publish_epoch(epoch, lease_token=lease_token)

        shop.epochs.publish = late  # type: ignore[method-assign]
        await meta.tick()
        assert len(members[0]) == 2
        assert await shop.epochs.members() == members[0][1:]

    async def test_all_users_forgotten(self, shop: Workshop) -> None:
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 8, "b": 8})
        await shop.users.forget("a")
        await shop.users.forget("b")
        await meta.tick()
        assert await shop.epoch_number() == 1


class TestDeadLetters:
    async def test_a_replayed_dead_letter_is_learned_once(self, shop: Workshop) -> None:
        [delivery] = await shop.give([make_event("a", 1)])
        await shop.streams.letters.bury(delivery, "c1", "by mistake")
        [letter] = (await shop.streams.letters.page(limit=9)).letters
        for _ in range(2):
            await shop.streams.letters.replay(0, letter.letter_id)
        await publish(shop)
        assert await shop.versions() == {"a": 1}
        counters = await sums(shop)
        assert (counters["buried"], counters["replayed"], counters["applied"]) == (1, 1, 1)

    async def test_a_dead_letter_of_a_forgotten_user_has_no_effect(self, shop: Workshop) -> None:
        [delivery] = await shop.give([make_event("a", 1)])
        await shop.streams.letters.bury(delivery, "c1", "by mistake")
        await shop.users.forget("a")
        assert (await shop.streams.letters.replay_everything()).replayed == 1
        await publish(shop)
        assert await shop.versions() == {"a": 0}
        assert (await sums(shop))["voided"] == 1


async def test_users_forgotten_amid_events_and_a_killed_worker(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    """Whatever the order, every event is applied once or void, and no incarnation has events of another."""
    shop = await open_workshop(partitions=2, samples_kept=1_000)
    people = [f"user {number}" for number in range(6)]
    incarnations = dict.fromkeys(people, 0)
    first, second = shop.start_process(valkey_url), None
    accepted = 0
    try:
        for number in range(300):
            user = people[number % 6]
            event = make_event(user, number, incarnation=incarnations[user])
            [answer] = await shop.streams.enqueue([event])
            accepted += answer.status == "accepted"
            if number % 17 == 5:
                incarnations[user] = (await shop.users.forget(user)).incarnation
                # decided before, sent after
                [late] = await shop.streams.enqueue([make_event(user, 1_000 + number, incarnation=event.incarnation)])
                assert late.status == "void"
            if number == 150:
                await soon(lambda: _applied(shop), "the worker applies events")
                second = shop.start_process(valkey_url)
                first.kill()
            await asyncio.sleep(0.002)
        await soon(lambda: _drained(shop), "the second worker finishes")
        assert second is not None
        second.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(second.communicate, timeout=workshop.SOON_S)
        assert second.returncode == 0, said
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate()
    assert accepted == 300
    counters = await sums(shop)
    assert counters["applied"] + counters["voided"] == 300
    assert counters["buried"] == 0
    standings = {**await shop.users.versions(0), **await shop.users.versions(1)}
    assert {user: incarnation for user, (incarnation, _) in standings.items()} == incarnations
    samples = await shop.users.load_samples(people)
    for user, (_, version) in standings.items():
        assert len(samples.get(user, [])) == version
    last = {people[number % 6]: number for number in range(300) if number % 17 == 5}
    for user, kept in samples.items():
        assert all(int(sample.arm_id) > last[user] for sample in kept), "no event from before the user was forgotten"


async def _applied(shop: Workshop) -> bool:
    return (await shop.users.counters())["applied"] > 0


async def _drained(shop: Workshop) -> bool:
    return await shop.streams.backlog() == 0
