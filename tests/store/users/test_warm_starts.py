"""A warm start is stored with the first decision, is valid for one incarnation, and is deleted with its user."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.codec import encode_tensors
from metaban.store.decisions.decisions import DecisionStore
from metaban.store.errors import CorruptRecord, FenceLost
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.users.users import UserStore
from metaban.store.users.warm_starts import StoredWarmStart
from tests.store.helpers import MakeEvent, MakeState, decided, learn


def make_start(*, incarnation: int = 0, version: int = 1) -> StoredWarmStart:
    return StoredWarmStart(incarnation, np.array([0.5, -1.25, 0.4]), version, (("5eed", 0.25), ("f00d", 1.5)), 77)


def same(one: StoredWarmStart, other: StoredWarmStart) -> bool:
    plain = (replace(one, values=np.empty(0)), replace(other, values=np.empty(0)))
    return np.array_equal(one.values, other.values) and repr(plain[0]) == repr(plain[1])


@pytest.fixture
def decisions(redis: Redis, keys: NamespaceKeys) -> DecisionStore:
    return DecisionStore(redis, keys, ttl_s=60)


@pytest.fixture
def user(neighbours: list[str]) -> str:
    return neighbours[0]


async def start_of(users: UserStore, user: str) -> StoredWarmStart | None:
    """The start as requests, updates and refits read it; they have to agree."""
    states, starts = await users.load_with_warm_starts([user, "another user"])
    _, _, for_updates = await users.load_learners([user, "another user"])
    assert starts.keys() == for_updates.keys() <= {user}
    if user in states:
        assert (await users.load_warm_starts(states)).keys() == starts.keys()
    return starts.get(user)


class TestRecord:
    def test_round_trip(self) -> None:
        start = make_start(incarnation=3)
        assert same(StoredWarmStart.decode(b"3", start.encode()), start)

    @pytest.mark.parametrize(
        "blob",
        [
            b"",
            b"nonsense",
            encode_tensors({"values": np.zeros(2)}, {}),
            encode_tensors({"values": np.zeros(2)}, {"start": "[]"}),
            encode_tensors({"values": np.zeros(2)}, {"start": '{"version": 1, "nearest": [[1, 2]], "created_ms": 1}'}),
            encode_tensors({"values": np.zeros(2)}, {"start": '{"version": 1, "nearest": [["a"]], "created_ms": 1}'}),
            encode_tensors({}, {"start": '{"version": 1, "nearest": [], "created_ms": 1}'}),
            encode_tensors({"values": np.zeros((2, 2))}, {"start": '{"version": 1, "nearest": [], "created_ms": 1}'}),
            encode_tensors({"values": np.zeros(2, "f4")}, {"start": '{"version": 1, "nearest": [], "created_ms": 1}'}),
            encode_tensors({"values": np.full(2, np.nan)}, {"start": '{"version": 1, "nearest": [], "created_ms": 1}'}),
        ],
    )
    def test_invalid_records_are_refused(self, blob: bytes) -> None:
        with pytest.raises(CorruptRecord):
            StoredWarmStart.decode(b"0", blob)

    @pytest.mark.parametrize("values", [np.array([np.inf]), np.zeros((1, 2))])
    def test_only_finite_vectors_are_written(self, values: np.ndarray) -> None:
        with pytest.raises(ValueError, match="finite"):
            replace(make_start(), values=values).encode()


class TestFirstDecision:
    async def test_the_start_is_stored_with_the_decision(
        self, users: UserStore, decisions: DecisionStore, user: str
    ) -> None:
        assert await start_of(users, user) is None
        await decisions.put(decided(user, "d"), profile=b"[1]", start=make_start())
        found = await start_of(users, user)
        assert found is not None
        assert same(found, make_start())

    async def test_the_first_start_is_kept(self, users: UserStore, decisions: DecisionStore, user: str) -> None:
        for version in (1, 2):
            await decisions.put(decided(user, f"d{version}"), start=make_start(version=version))
        found = await start_of(users, user)
        assert found is not None
        assert found.version == 1

    async def test_no_start_for_a_user_with_events(
        self, redis: Redis, keys, users: UserStore, stream: EventStream, decisions, user, make_event, make_state
    ) -> None:
        await learn(stream, users, make_state(user, 1), make_event(user, "e"))
        await decisions.put(decided(user, "d"), start=make_start())
        assert not await redis.exists(keys.start(user))

    async def test_no_start_in_another_incarnation(self, redis: Redis, keys, users: UserStore, decisions, user) -> None:
        await users.forget(user)
        with pytest.raises(FenceLost):
            await decisions.put(decided(user, "d"), start=make_start())
        assert not await redis.exists(keys.start(user))
        with pytest.raises(ValueError, match="incarnation"):
            await decisions.put(decided(user, "d", incarnation=1), start=make_start())
        await decisions.put(decided(user, "d", incarnation=1), start=make_start(incarnation=1))
        found = await start_of(users, user)
        assert found is not None
        assert found.incarnation == 1

    async def test_it_is_kept_when_the_user_learns(
        self, users: UserStore, stream: EventStream, decisions, user, make_event: MakeEvent, make_state: MakeState
    ) -> None:
        await decisions.put(decided(user, "d"), start=make_start())
        await learn(stream, users, make_state(user, 1), make_event(user, "e"))
        found = await start_of(users, user)
        assert found is not None
        assert same(found, make_start())


class TestHolding:
    async def test_forgetting_deletes_it(self, redis: Redis, keys, users: UserStore, decisions, user: str) -> None:
        await decisions.put(decided(user, "d"), start=make_start())
        await users.forget(user)
        assert not await redis.exists(keys.start(user))

    async def test_a_start_of_another_incarnation_is_ignored_and_replaced(
        self, redis: Redis, keys, users: UserStore, decisions, user: str
    ) -> None:
        await redis.hset(keys.start(user), mapping={"incarnation": "4", "start": make_start().encode()})
        assert await start_of(users, user) is None
        await decisions.put(decided(user, "d"), start=make_start(version=9))
        found = await start_of(users, user)
        assert found is not None
        assert (found.version, found.incarnation) == (9, 0)

    async def test_a_damaged_start_is_ignored_and_logged_without_user_id(
        self, redis: Redis, keys, users: UserStore, neighbours: list[str], decisions, caplog
    ) -> None:
        one, two = neighbours[:2]
        await redis.hset(keys.start(one), mapping={"incarnation": "0", "start": b"damaged"})
        await decisions.put(decided(two, "d"), start=make_start())
        with caplog.at_level(logging.ERROR):
            _, starts = await users.load_with_warm_starts([one, two])
        assert list(starts) == [two]
        assert "warm_start_damaged" in caplog.text
        assert one not in caplog.text

    async def test_after_the_user_was_forgotten(
        self, redis: Redis, keys, users: UserStore, stream: EventStream, neighbours, make_event, make_state
    ) -> None:
        stays, gone, back, restored, never = neighbours[:5]
        for each in (stays, gone, back, restored):
            await learn(stream, users, make_state(each, 1), make_event(each, "e"))
        for each in (gone, back):
            await users.forget(each)
        again = make_event(back, "later", incarnation=1)
        await learn(stream, users, make_state(back, 1, incarnation=1), again, (1, 0))
        await redis.hset(keys.user(restored), "incarnation", "7")
        asked = dict.fromkeys((stays, gone, back, restored, never), 0)
        assert await users.forgotten_since(asked) == {gone, back, never}
        assert await users.forgotten_since({back: 1}) == set()
