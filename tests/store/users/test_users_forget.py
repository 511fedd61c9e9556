"""Forgetting: only a tombstone of the user is left, and nothing decided before has an effect."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from metaban.store.errors import BacklogFull, CorruptRecord, FenceLost, StoreError, StoreReset
from metaban.store.events.event import RewardEvent
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.users.records import UserSummary, UserUpdate
from metaban.store.users.users import UserStore
from tests.store.helpers import MakeEvent, MakeState, Picture, learn


@pytest.fixture
def user(neighbours: list[str]) -> str:
    return neighbours[0]


async def sums_hold(stream: EventStream, users: UserStore) -> bool:
    """Check that the counters add up."""
    counters = await users.counters()
    versions = [version for partition in (0, 1) for _, version in (await users.versions(partition)).values()]
    finished = counters["applied"] + counters["voided"] + counters["buried"]
    return (
        counters["enqueued"] + counters["replayed"] == finished + await stream.backlog()
        and counters["applied"] == sum(versions) + counters["forgotten"]
    )


async def test_all_but_a_tombstone_is_gone(
    redis: Redis, keys: NamespaceKeys, stream, users: UserStore, make_event: MakeEvent, make_state: MakeState, user: str
):
    await learn(stream, users, make_state(user, 1, epoch=3), make_event(user, "a"))
    assert await users.summary(user) == UserSummary(0, 1, epoch=3, samples=1, forgotten=False)
    refitted = replace((await users.load([user]))[user], epoch=4)
    assert await users.rebase(0, [refitted], refit=1) == [True]
    assert set(await users.load_replaced([refitted])) == {user}
    forgotten = await users.forget(user)
    assert (forgotten.incarnation, forgotten.samples) == (1, 1)
    assert await users.summary(user) == UserSummary(1, 0, epoch=None, samples=0, forgotten=True)
    tombstone = (await users.load([user]))[user]
    assert (tombstone.incarnation, tombstone.version, tombstone.tensors) == (1, 0, {})
    assert tombstone.forgotten
    assert await users.load_samples([user]) == {}
    assert await users.load_replaced([refitted]) == {}
    assert await users.fitted_under([user]) == {}
    assert await users.versions(0) == {user: (1, 0)}
    assert set(await redis.hgetall(keys.user(user))) == {b"incarnation", b"version", b"forgot"}
    line = (await users.tail(0, "0-0", block_ms=0, count=9))[-1]
    assert line.cursor == forgotten.line
    assert (line.user_id, line.incarnation, line.version, line.entry_ids, line.applied) == (user, 1, 0, (), 1)
    assert (await users.counters())["forgotten"] == 1
    assert await sums_hold(stream, users)


async def test_forgetting_an_unknown_user_and_twice(users: UserStore, user: str):
    assert await users.summary(user) is None
    assert [(await users.forget(user)).incarnation for _ in range(2)] == [1, 2]
    assert await users.versions(0) == {user: (2, 0)}
    raced = await asyncio.gather(*(users.forget(user) for _ in range(10)))
    assert sorted(each.incarnation for each in raced) == list(range(3, 13))


async def test_a_forgotten_user_starts_as_new(stream, users: UserStore, make_event, make_state, user: str):
    await learn(stream, users, make_state(user, 1), make_event(user, "a"))
    await users.forget(user)
    again = make_event(user, "b", incarnation=1, reward=0.75)
    await learn(stream, users, make_state(user, 1, incarnation=1), again, expected=(1, 0))
    assert await users.summary(user) == UserSummary(1, 1, epoch=0, samples=1, forgotten=False)
    assert [sample.reward for sample in (await users.load_samples([user]))[user]] == [0.75]
    assert await sums_hold(stream, users)


async def test_updates_in_progress_are_refused_by_the_fence(
    stream, users: UserStore, make_event, make_state, user: str, picture: Picture
):
    await learn(stream, users, make_state(user, 1), make_event(user, "a"))
    await stream.enqueue([make_event(user, "b")])
    [delivery] = await stream.read([0], "one", count=9, block_ms=0)
    await users.forget(user)
    before = await picture()
    update = UserUpdate(make_state(user, 2), 1, 0, [], [delivery.entry_id])
    with pytest.raises(FenceLost) as refused:
        await users.apply(0, "one", [delivery.entry_id], [update])
    assert refused.value.reason == "version"
    assert await users.rebase(0, [make_state(user, 1, epoch=9)]) == [False]
    assert await picture() == before


class TestEnqueue:
    async def test_events_of_earlier_decisions_are_void(
        self, redis: Redis, stream: EventStream, users, keys, make_event, user: str
    ):
        [accepted] = await stream.enqueue([make_event(user, "a")])
        await users.forget(user)
        answers = await stream.enqueue(
            [
                make_event(user, "a"),
                make_event(user, "b"),
                make_event(user, "b"),
                make_event(user, "c", incarnation=1),
                make_event("another", "d"),
            ]
        )
        assert [answer.status for answer in answers] == ["duplicate", "void", "void", "accepted", "accepted"]
        assert answers[0].entry_id == accepted.entry_id
        assert answers[1].entry_id == ""
        assert await stream.backlog() == 3
        assert not await redis.exists(keys.seen(user, "b"))
        assert (await users.counters())["enqueued"] == 3

    async def test_void_events_take_no_room(self, redis: Redis, keys, users, make_event, user: str):
        stream = EventStream(redis, keys, dedupe_window_s=60, backlog_limit=1)
        await stream.enqueue([make_event(user, "a")])
        await users.forget(user)
        assert [a.status for a in await stream.enqueue([make_event(user, "b")])] == ["void"]
        with pytest.raises(BacklogFull):
            await stream.enqueue([make_event(user, "b"), make_event(user, "c", incarnation=1)])

    async def test_events_stored_without_an_incarnation(self, make_event, user: str):
        fields = make_event(user, "a", incarnation=7).encode()
        assert RewardEvent.decode(fields).incarnation == 7
        del fields[b"i"]
        assert RewardEvent.decode(fields).incarnation == 0
        with pytest.raises(CorruptRecord):
            RewardEvent.decode({**fields, b"i": b"first"})


class TestRefusals:
    @pytest.mark.parametrize("marker", ["another store", None])
    async def test_another_store(self, redis: Redis, keys, users: UserStore, user: str, picture: Picture, marker):
        await (redis.delete(keys.marker(0)) if marker is None else redis.set(keys.marker(0), marker))
        before = await picture()
        with pytest.raises(StoreReset):
            await users.forget(user)
        assert await picture() == before

    @pytest.mark.parametrize("spoiled", ["counters", "update_log", "versions"])
    async def test_a_key_of_another_type(self, redis: Redis, keys, users, user: str, picture: Picture, spoiled: str):
        await redis.set(getattr(keys, spoiled)(0), "spoiled")
        before = await picture()
        with pytest.raises(StoreError):
            await users.forget(user)
        assert await picture() == before

    @pytest.mark.parametrize(("key", "field"), [("counters", "forgotten"), ("versions", "user")])
    async def test_damaged_numbers(self, redis: Redis, keys, users, user: str, picture: Picture, key: str, field: str):
        await redis.hset(getattr(keys, key)(0), user if field == "user" else field, "no number")
        before = await picture()
        with pytest.raises(StoreError):
            await users.forget(user)
        assert await picture() == before

    async def test_a_damaged_counter_of_void_events(
        self, redis: Redis, keys, stream, users, make_event, user: str, picture: Picture
    ):
        await stream.enqueue([make_event(user, "a")])
        [delivery] = await stream.read([0], "one", count=9, block_ms=0)
        await redis.hset(keys.counters(0), "voided", "no number")
        before = await picture()
        with pytest.raises(StoreError):
            await users.apply(0, "one", [delivery.entry_id], [])
        assert await picture() == before

    async def test_a_damaged_user_can_be_forgotten(self, redis: Redis, keys, users: UserStore, user: str):
        await redis.hset(keys.user(user), mapping={"incarnation": 0, "version": 3, "state": b"\x00"})
        await redis.set(keys.samples(user), "no list")
        assert await users.load([user]) == {}
        await users.forget(user)
        assert (await users.load([user]))[user].forgotten

    async def test_a_missing_state_is_not_a_tombstone(self, redis: Redis, keys, users: UserStore, user: str):
        await redis.hset(keys.user(user), mapping={"incarnation": 0, "version": 3, "epoch": 1})
        with pytest.raises(CorruptRecord):
            await users.load_learners([user])
