"""Every event counts once, whoever else is at work; what cannot be learned is buried and holds up nobody."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from store.errors import FenceLost, StoreReset
from store.users import UserState, UserStore, UserUpdate
from tests.worker.conftest import OpenWorkshop
from tests.worker.workshop import Workshop, features, layout, make_event, make_sample
from worker.trainer import Pupil


def held_before_apply(shop: Workshop) -> tuple[UserStore, asyncio.Event, asyncio.Event]:
    """A way to the users on which an apply waits: (store, it has come, let it pass)."""
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
    """The stored state is what the current epoch makes of the stored samples."""
    current = await shop.epochs.current()
    assert current is not None
    state = (await shop.users.load([user]))[user]
    assert state.epoch == current.number
    samples = (await shop.users.load_samples([user]))[user]
    model = shop.new_model()
    await model.refresh_epoch()
    assert model.trainer is not None
    again = model.trainer.fit(model.epoch.tensors, [Pupil(user, state.version, samples, None)])
    np.testing.assert_allclose(state.tensors["theta"], again.states[0]["theta"], rtol=1e-4, atol=1e-5)


class TestApplying:
    async def test_all_events_of_all_users_in_one_go(self, shop: Workshop) -> None:
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
        np.testing.assert_allclose(states["a"].tensors["theta"], states["b"].tensors["theta"], rtol=1e-5, atol=1e-6)

    async def test_nothing_to_do(self, shop: Workshop) -> None:
        assert await shop.publisher().publish(0, []) is None

    async def test_quarantined_learners_are_counted(self, shop: Workshop) -> None:
        await shop.learn({"broken": 1}, first=50)
        # No event brings such a reward; a learner must not be trusted for that.
        await shop.redis.rpush(shop.keys.samples("broken"), make_sample(51, reward=1e300).encode())
        events = [make_event("sound", 1), make_event("broken", 2), make_event("sound", 3)]
        await shop.publisher().publish(0, await shop.give(events))
        assert await shop.versions() == {"sound": 2, "broken": 2}
        assert (await shop.users.counters())["quarantined"] == 1
        states = await shop.users.load(["sound", "broken"])
        trainer = shop.model.trainer
        assert trainer is not None
        newborn = trainer.learner.newborn(shop.model.epoch.tensors)
        np.testing.assert_array_equal(states["broken"].tensors["theta"], newborn["theta"].numpy())
        assert not np.array_equal(states["sound"].tensors["theta"], newborn["theta"].numpy())

    @pytest.mark.parametrize("reward", [-0.001, 1.001, 1e300])
    async def test_a_reward_that_no_service_takes_is_buried(self, shop: Workshop, reward: float) -> None:
        await shop.publisher().publish(0, await shop.give([make_event("a", 1, reward=reward), make_event("a", 2)]))
        assert await shop.versions() == {"a": 1}
        [letter] = await shop.dead_letters()
        assert b"between 0 and 1" in letter[b"dead_reason"]

    async def test_another_store_at_the_same_address_ends_the_work(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 1)])
        await shop.redis.set(shop.keys.marker(0), "another")
        with pytest.raises(StoreReset):
            await shop.publisher().publish(0, deliveries)
        assert await shop.versions() == {}


class TestRaces:
    async def test_a_user_that_two_consumers_move_at_once(self, shop: Workshop) -> None:
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

    async def test_what_another_consumer_claimed_is_left_to_it(self, shop: Workshop) -> None:
        deliveries = await shop.give([make_event("a", 1), make_event("a", 2), make_event("b", 3), make_event("c", 4)])
        claimed = await shop.streams.claim_stalled(0, "c2", min_idle_ms=0, count=2)
        await shop.publisher("c1").publish(0, deliveries)
        assert await shop.versions() == {"b": 1, "c": 1}
        assert await shop.pending() == 2
        await shop.publisher("c2").publish(0, claimed)
        assert await shop.versions() == {"a": 2, "b": 1, "c": 1}
        assert await shop.pending() == 0

    async def test_users_that_never_stand_still_are_tried_again_later(self, shop: Workshop) -> None:
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
        """What a meta-trainer of another process does once sixteen events are there."""
        await shop.meta("another", model=shop.new_model())._tick()

    async def test_a_fit_that_an_epoch_overtakes_is_made_again(self, shop: Workshop) -> None:
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

    async def test_a_process_that_has_not_heard_of_the_epoch(self, shop: Workshop) -> None:
        await self.publish_next_epoch(shop)
        behind = shop.new_model()
        await behind.refresh_epoch()
        await shop.learn({"a": 16})
        await self.publish_next_epoch(shop)
        assert (behind.epoch.number, await shop.epoch_number()) == (0, 1)
        await shop.publisher(model=behind).publish(0, await shop.give([make_event("a", 50), make_event("new", 51)]))
        assert await shop.versions() == {"a": 17, "new": 1}
        await fitted_under_current_epoch(shop, "a")
        await fitted_under_current_epoch(shop, "new")


class TestBurial:
    async def test_what_is_no_event_is_buried_and_its_neighbours_are_applied(self, shop: Workshop) -> None:
        await shop.streams.enqueue([make_event("a", 1)])
        await shop.redis.xadd(shop.keys.events(0), {"hello": "world"})
        await shop.streams.enqueue([make_event("b", 2, features=features(2, inputs=7)), make_event("c", 3)])
        deliveries = await shop.streams.read(0, "c1", count=10, block_ms=1)
        assert await shop.publisher().publish(0, deliveries) == 2
        assert await shop.versions() == {"a": 1, "c": 1}
        letters = await shop.dead_letters()
        assert [letter[b"dead_reason"] for letter in letters] == [
            b"the entry is not a reward event",
            b"7 inputs and 0 notes do not fit the namespace's layout and learner",
        ]
        assert letters[0][b"hello"] == b"world"
        assert letters[1][b"u"] == b"b"
        assert await shop.streams.backlog() == await shop.pending() == 0
        assert (await shop.users.counters())["buried"] == 2

    async def test_notes_of_another_learner_are_buried_at_once(self, shop: Workshop) -> None:
        noted = make_event("b", 2, phi=np.ones(4, dtype=np.float32))
        assert await shop.publisher().publish(0, await shop.give([make_event("a", 1), noted])) == 1
        [letter] = await shop.dead_letters()
        assert letter[b"dead_reason"] == b"3 inputs and 4 notes do not fit the namespace's layout and learner"

    async def test_only_misfits(self, shop: Workshop) -> None:
        await shop.redis.xadd(shop.keys.events(0), {"hello": "world"})
        deliveries = await shop.streams.read(0, "c1", count=10, block_ms=1)
        assert await shop.publisher().publish(0, deliveries) is None
        assert len(await shop.dead_letters()) == 1

    async def test_a_misfit_that_another_consumer_has_claimed_is_left_to_it(self, shop: Workshop) -> None:
        await shop.redis.xadd(shop.keys.events(0), {"hello": "world"})
        deliveries = await shop.streams.read(0, "c1", count=10, block_ms=1)
        claimed = await shop.streams.claim_stalled(0, "c2", min_idle_ms=0, count=2)
        await shop.publisher("c1").publish(0, deliveries)
        assert await shop.dead_letters() == []
        await shop.publisher("c2").publish(0, claimed)
        assert len(await shop.dead_letters()) == 1

    async def test_a_layout_fixed_a_moment_ago_is_noticed(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(fixed=False)
        publisher = shop.publisher()
        assert shop.model.trainer is None
        await shop.namespaces.set_layout(shop.record, layout().to_json())
        assert await publisher.publish(0, await shop.give([make_event("a", 1)])) == 1
        assert await shop.dead_letters() == []


async def test_samples_of_something_else_fail_their_user_alone(shop: Workshop) -> None:
    """Two partitions' consumers share a desk; a broken user of one is no trouble of the other."""
    deliveries = await shop.give([make_event("broken", 1)])
    state = UserState("broken", 0, 1, 0, {"theta": np.zeros(2, dtype=np.float32)})
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
