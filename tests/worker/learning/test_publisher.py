"""Publisher: every event is applied once, also with competing processes; invalid events become dead letters."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from metaban.store.errors import FenceLost, StoreReset
from metaban.store.users.records import UserState, UserUpdate
from metaban.store.users.users import UserStore
from metaban.worker.learning.model import NamespaceModel
from metaban.worker.learning.trainer import FitInput
from tests.worker.epochs.epoch_checks import before_first
from tests.worker.workshop import NOTED, OpenWorkshop, Workshop, features, layout, make_event, make_sample, small_paper


def held_before_apply(shop: Workshop) -> tuple[UserStore, asyncio.Event, asyncio.Event]:
    """A user store whose apply waits: (store, event that it was reached, event that lets it go on)."""
    store, come, passing = shop.user_store(), asyncio.Event(), asyncio.Event()
    apply = store.apply

    async def late(*arguments: Any) -> int:
        come.set()
        async with asyncio.timeout(30):
            await passing.wait()
        return await apply(*arguments)

    store.apply = late  # type: ignore[method-assign]
    return store, come, passing


async def fitted_under_current_epoch(shop: Workshop, user: str) -> None:
    """Check that the stored state equals a fit of the stored samples under the current epoch."""
    current = await shop.epochs.current()
    assert current is not None
    state = (await shop.users.load([user]))[user]
    assert state.epoch == current.number
    samples = (await shop.users.load_samples([user]))[user]
    model = shop.new_model()
    await model.refresh_epoch()
    assert model.trainer is not None
    again = model.trainer.fit(model.epoch.tensors, [FitInput(user, state.version, samples, None)])
    np.testing.assert_allclose(state.tensors["head"], again.states[0]["head"], rtol=1e-4, atol=1e-5)


class TestApplying:
    async def test_all_events_of_all_users_at_once(self, shop: Workshop) -> None:
        plan = {f"user {number}": number % 8 + 1 for number in range(30)}
        events = [make_event(user, number) for number in range(8) for user, most in plan.items() if number < most]
        applied = await shop.publisher().publish(0, await shop.give(events))
        assert applied == len(events) == sum(plan.values())
        assert await shop.versions() == plan
        samples = await shop.users.load_samples(plan)
        for user, most in plan.items():
            kept = range(most)[-shop.samples_kept :]
            assert [sample.arm_id for sample in samples[user]] == [str(number) for number in kept]
            np.testing.assert_array_equal(samples[user][-1].features, features(most - 1))
        assert await shop.pending() == 0
        assert await shop.streams.backlog() == 0
        assert (await shop.users.counters())["applied"] == len(events)
        states = await shop.users.load(plan)
        assert {state.version for state in states.values()} == set(plan.values())
        trainer = shop.model.trainer
        assert trainer is not None
        for state in states.values():
            assert {name: array.shape for name, array in state.tensors.items()} == trainer.learner.fields

    async def test_a_learner_depends_on_its_samples_not_on_how_they_were_batched(self, shop: Workshop) -> None:
        events = [make_event("a", number) for number in range(9)]
        await shop.publisher().publish(0, await shop.give(events[:1]))
        await shop.publisher().publish(0, await shop.give(events[1:4]))
        await shop.publisher().publish(0, await shop.give(events[4:]))
        await shop.publisher().publish(0, await shop.give([make_event("b", number) for number in range(9)]))
        states = await shop.users.load(["a", "b"])
        np.testing.assert_allclose(states["a"].tensors["head"], states["b"].tensors["head"], rtol=1e-5, atol=1e-6)

    async def test_nothing_to_do(self, shop: Workshop) -> None:
        assert await shop.publisher().publish(0, []) is None

    async def test_quarantined_learners_are_counted(self, shop: Workshop) -> None:
        await shop.learn({"broken": 1}, first=50)
        # No event has such a reward, but the check must not rely on that.
        await shop.redis.rpush(shop.keys.samples("broken"), make_sample(51, reward=1e300, noted=NOTED).encode())
        events = [make_event("sound", 1), make_event("broken", 2), make_event("sound", 3)]
        await shop.publisher().publish(0, await shop.give(events))
        assert await shop.versions() == {"sound": 2, "broken": 2}
        assert (await shop.users.counters())["quarantined"] == 1
        states = await shop.users.load(["sound", "broken"])
        trainer = shop.model.trainer
        assert trainer is not None
        new_user = trainer.learner.initial_user(shop.model.epoch.tensors)
        np.testing.assert_array_equal(states["broken"].tensors["head"], new_user["head"].numpy())
        assert not np.array_equal(states["sound"].tensors["head"], new_user["head"].numpy())

    @pytest.mark.parametrize("reward", [-0.001, 1.001, 1e300])
    async def test_a_reward_outside_the_range_becomes_a_dead_letter(self, shop: Workshop, reward: float) -> None:
        await shop.publisher().publish(0, await shop.give([make_event("a", 1, reward=reward), make_event("a", 2)]))
        assert await shop.versions() == {"a": 1}
        [letter] = await shop.dead_letters()
        assert b"between 0 and 1" in letter[b"dead_reason"]

    async def test_another_store_at_the_same_address_raises_store_reset(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 1)])
        await shop.redis.set(shop.keys.marker(0), "another")
        with pytest.raises(StoreReset):
            await shop.publisher().publish(0, deliveries)
        assert await shop.versions() == {}


class TestRaces:
    async def test_two_consumers_update_a_user_at_once(self, shop: Workshop) -> None:
        """Both have loaded the same version before either applies: the second computes again."""
        first = await shop.give([make_event("a", number) for number in range(3)], "c1")
        second = await shop.give([make_event("a", number) for number in range(3, 7)], "c2")
        store, come, passing = held_before_apply(shop)
        slow = asyncio.create_task(shop.publisher("c1", users=store).publish(0, first))
        await come.wait()
        await shop.publisher("c2").publish(0, second)
        passing.set()
        await slow
        assert await shop.versions() == {"a": 7}
        samples = (await shop.users.load_samples(["a"]))["a"]
        assert [sample.arm_id for sample in samples] == ["5", "6", "0", "1", "2"]
        assert await shop.streams.backlog() == 0
        assert (await shop.users.counters())["applied"] == 7

    async def test_many_consumers_on_the_same_users(self, shop: Workshop) -> None:
        shares = [
            await shop.give(
                [make_event(f"user {number % 3}", number) for number in range(10 * c, 10 * c + 10)], f"c{c}"
            )
            for c in range(5)
        ]
        async with asyncio.timeout(30):
            await asyncio.gather(*(shop.publisher(f"c{c}").publish(0, share) for c, share in enumerate(shares)))
        assert sum((await shop.versions()).values()) == 50
        assert (await shop.users.counters())["applied"] == 50
        assert await shop.streams.backlog() == 0

    async def test_the_same_deliveries_twice_at_once(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 1), make_event("b", 2), make_event("a", 3)])
        publisher = shop.publisher()
        outcomes = await asyncio.gather(publisher.publish(0, deliveries), shop.publisher().publish(0, deliveries))
        assert sorted(outcomes, key=str) == [3, None]
        assert await shop.versions() == {"a": 2, "b": 1}
        assert await publisher.publish(0, deliveries) is None

    async def test_events_claimed_by_another_consumer_are_left_to_it(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 1), make_event("a", 2), make_event("b", 3), make_event("c", 4)])
        claimed = await shop.streams.claim_stalled([0], "c2", min_idle_ms=0, count=2)
        await shop.publisher("c1").publish(0, deliveries)
        assert await shop.versions() == {"b": 1, "c": 1}
        assert await shop.pending() == 2
        await shop.publisher("c2").publish(0, claimed)
        assert await shop.versions() == {"a": 2, "b": 1, "c": 1}
        assert await shop.pending() == 0

    async def test_users_that_change_all_the_time_are_tried_again_later(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 1)])
        store = shop.user_store()
        load = store.load_learners
        moves = 0

        async def move_then_tell(user_ids: Any) -> Any:
            nonlocal moves
            loaded = await load(user_ids)
            moves += 1
            await shop.publisher("c2").publish(0, await shop.give([make_event("a", 100 + moves)], "c2"))
            return loaded

        store.load_learners = move_then_tell  # type: ignore[method-assign]
        with pytest.raises(FenceLost):
            await shop.publisher(users=store).publish(0, deliveries)
        assert await shop.pending() == 1
        await shop.publisher().publish(0, deliveries)
        assert await shop.versions() == {"a": moves + 1}


class TestEpochs:
    async def publish_next_epoch(self, shop: Workshop) -> None:
        """The epoch that another process publishes after sixteen events."""
        await shop.epoch_trainer("another", model=shop.new_model()).tick()

    async def model_one_epoch_behind(self, shop: Workshop) -> NamespaceModel:
        await self.publish_next_epoch(shop)
        behind = shop.new_model()
        await behind.refresh_epoch()
        await shop.learn({"a": 16})
        await self.publish_next_epoch(shop)
        return behind

    async def test_a_fit_under_an_outdated_epoch_is_repeated(self, shop: Workshop) -> None:
        await self.publish_next_epoch(shop)
        await shop.learn({"a": 15, "b": 1})
        deliveries = await shop.give([make_event("a", 70)])
        store, come, passing = held_before_apply(shop)
        slow = asyncio.create_task(shop.publisher(users=store).publish(0, deliveries))
        await come.wait()
        await self.publish_next_epoch(shop)
        assert await shop.epoch_number() == 1
        assert (await shop.users.load(["a"]))["a"].epoch == 1
        passing.set()
        await slow
        assert await shop.versions() == {"a": 16, "b": 1}
        await fitted_under_current_epoch(shop, "a")
        await fitted_under_current_epoch(shop, "b")

    async def test_a_process_that_does_not_know_the_epoch_yet(self, shop: Workshop) -> None:
        behind = await self.model_one_epoch_behind(shop)
        assert (behind.epoch.number, await shop.epoch_number()) == (0, 1)
        await shop.publisher(model=behind).publish(0, await shop.give([make_event("a", 50), make_event("new", 51)]))
        assert await shop.versions() == {"a": 17, "new": 1}
        await fitted_under_current_epoch(shop, "a")
        await fitted_under_current_epoch(shop, "new")

    async def test_a_decision_of_a_later_epoch_is_fitted_under_that_one(self, shop: Workshop) -> None:
        behind = await self.model_one_epoch_behind(shop)
        store, come, passing = held_before_apply(shop)
        deliveries = await shop.give([make_event("a", 50, epoch=1)])
        slow = asyncio.create_task(shop.publisher(users=store, model=behind).publish(0, deliveries))
        await come.wait()
        assert behind.epoch.number == 1, "adopted before the fit, not after it"
        passing.set()
        await slow
        await fitted_under_current_epoch(shop, "a")


class TestDeadLetters:
    async def test_invalid_entries_become_dead_letters_and_others_are_applied(self, shop: Workshop) -> None:
        await shop.streams.enqueue([make_event("a", 1)])
        await shop.redis.xadd(shop.keys.events(0), {"hello": "world"})
        await shop.streams.enqueue([make_event("b", 2, features=features(2, inputs=7)), make_event("c", 3)])
        deliveries = await shop.streams.read([0], "c1", count=10, block_ms=1)
        assert await shop.publisher().publish(0, deliveries) == 2
        assert await shop.versions() == {"a": 1, "c": 1}
        letters = await shop.dead_letters()
        assert [letter[b"dead_reason"] for letter in letters] == [
            b"the entry is not a reward event",
            f"7 inputs and {NOTED} notes do not fit the namespace's layout and learner".encode(),
        ]
        assert letters[0][b"hello"] == b"world"
        assert letters[1][b"u"] == b"b"
        assert await shop.streams.backlog() == await shop.pending() == 0
        assert (await shop.users.counters())["buried"] == 2

    async def test_notes_of_another_learner_become_dead_letters_at_once(self, shop: Workshop) -> None:
        noted = make_event("b", 2, phi=np.ones(7, dtype=np.float32))
        assert await shop.publisher().publish(0, await shop.give([make_event("a", 1), noted])) == 1
        [letter] = await shop.dead_letters()
        assert letter[b"dead_reason"] == b"3 inputs and 7 notes do not fit the namespace's layout and learner"

    async def test_only_invalid_entries(self, shop: Workshop) -> None:
        await shop.redis.xadd(shop.keys.events(0), {"hello": "world"})
        deliveries = await shop.streams.read([0], "c1", count=10, block_ms=1)
        assert await shop.publisher().publish(0, deliveries) is None
        assert len(await shop.dead_letters()) == 1

    async def test_an_invalid_entry_claimed_by_another_consumer_is_left_to_it(self, shop: Workshop) -> None:
        await shop.redis.xadd(shop.keys.events(0), {"hello": "world"})
        deliveries = await shop.streams.read([0], "c1", count=10, block_ms=1)
        claimed = await shop.streams.claim_stalled([0], "c2", min_idle_ms=0, count=2)
        await shop.publisher("c1").publish(0, deliveries)
        assert await shop.dead_letters() == []
        await shop.publisher("c2").publish(0, claimed)
        assert len(await shop.dead_letters()) == 1

    async def test_a_layout_set_just_now_is_noticed(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(fixed=False)
        publisher = shop.publisher()
        assert shop.model.trainer is None
        await shop.namespaces.set_layout(shop.record, layout().to_json())
        assert await publisher.publish(0, await shop.give([make_event("a", 1)])) == 1
        assert await shop.dead_letters() == []


async def test_invalid_stored_samples_fail_only_their_user(shop: Workshop) -> None:
    """Two partitions' consumers share a FitBatcher; a broken user of one does not affect the other."""
    deliveries = await shop.give([make_event("broken", 1)])
    state = UserState("broken", 0, 1, 0, {"head": np.zeros(2, dtype=np.float32)})
    event = deliveries[0].event
    assert event is not None
    foreign = replace(event.sample(), features=np.zeros(1, dtype=np.float32))
    update = UserUpdate(state, 0, 0, [foreign], [deliveries[0].entry_id])
    await shop.users.apply(0, "c1", [deliveries[0].entry_id], [update])

    publisher = shop.publisher()
    broken = await shop.give([make_event("broken", 2)])
    sound = await shop.give([make_event("sound", 3)])
    outcomes = await asyncio.gather(publisher.publish(0, broken), publisher.publish(0, sound), return_exceptions=True)
    assert isinstance(outcomes[0], ValueError)
    assert outcomes[1] == 2
    assert await shop.versions() == {"broken": 1, "sound": 1}
    assert await shop.pending() == 1


class TestPreviousState:
    """The learner `paper` with checkpoints goes on from the previous state, but not from one under other inputs."""

    async def test_ahead_of_the_epoch_to_be_published(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(settings=small_paper(draw="uniform"))
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 16})
        assert await fits_of(shop, "a") == (0, 1)
        await shop.learn({"a": 1}, first=20)
        assert await fits_of(shop, "a") == (0, 2)
        seen: list[tuple[int, int]] = []

        async def learn_more() -> None:
            seen.append(await fits_of(shop, "a"))
            await shop.learn({"a": 1}, first=30)
            seen.append(await fits_of(shop, "a"))

        before_first(shop.epochs, "publish", learn_more)
        await meta.tick()
        assert seen == [(1, 1), (0, 1)]
        assert await fits_of(shop, "a") == (1, 1)

    async def test_left_behind_by_a_refit(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(settings=small_paper(draw="uniform"))
        meta = shop.epoch_trainer()
        await meta.tick()
        await shop.learn({"a": 16})
        await meta.tick()
        await shop.learn({"a": 1}, first=20)
        assert await fits_of(shop, "a") == (1, 2)
        # As a restore labels users who were not fitted under the epoch of the snapshot.
        await shop.redis.hset(shop.keys.user("a"), "epoch", "0")
        await shop.learn({"a": 1}, first=30)
        assert await fits_of(shop, "a") == (1, 1)


async def fits_of(shop: Workshop, user: str) -> tuple[int, int]:
    """The epoch of a user's state, and the fits that its checkpoints are of."""
    state = (await shop.users.load([user]))[user]
    return state.epoch, int(state.tensors["fits"])
