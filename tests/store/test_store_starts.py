"""A start is written with the first decision, holds for one incarnation, and goes with its user."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis

from store.codec import encode_tensors
from store.decisions import DecisionStore
from store.errors import CorruptRecord, FenceLost
from store.events import EventStream
from store.keys import NamespaceKeys
from store.starts import Start
from store.users import UserStore
from tests.store.conftest import MakeEvent, MakeState
from tests.store.test_store_forget import learn
from tests.store.test_store_traces import decided


def make_start(*, incarnation: int = 0, version: int = 1) -> Start:
    return Start(incarnation, np.array([0.5, -1.25, 0.4]), version, (("5eed", 0.25), ("f00d", 1.5)), 77)


def same(one: Start, other: Start) -> bool:
    plain = (replace(one, values=np.empty(0)), replace(other, values=np.empty(0)))
    return np.array_equal(one.values, other.values) and repr(plain[0]) == repr(plain[1])


@pytest.fixture
def decisions(redis: Redis, keys: NamespaceKeys) -> DecisionStore:
    return DecisionStore(redis, keys, ttl_s=60)


@pytest.fixture
def user(neighbours: list[str]) -> str:
    return neighbours[0]


async def start_of(users: UserStore, user: str) -> Start | None:
    """As requests, updates and refits see it, who have to agree."""
    states, starts = await users.load_with_starts([user, "somebody else"])
    _, _, for_updates = await users.load_learners([user, "somebody else"])
    assert starts.keys() == for_updates.keys() <= {user}
    if user in states:
        assert (await users.load_starts(states)).keys() == starts.keys()
    return starts.get(user)


class TestRecord:
    def test_there_and_back(self) -> None:
        start = make_start(incarnation=3)
        assert same(Start.decode(b"3", start.encode()), start)

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
    def test_anything_else_is_refused(self, blob: bytes) -> None:
        with pytest.raises(CorruptRecord):
            Start.decode(b"0", blob)

    @pytest.mark.parametrize("values", [np.array([np.inf]), np.zeros((1, 2))])
    def test_only_finite_vectors_are_written(self, values: np.ndarray) -> None:
        with pytest.raises(ValueError, match="finite"):
            replace(make_start(), values=values).encode()


class TestFirstDecision:
    async def test_it_is_written_with_it(self, users: UserStore, decisions: DecisionStore, user: str) -> None:
        assert await start_of(users, user) is None
        await decisions.put(decided(user, "d"), profile=b"[1]", start=make_start())
        found = await start_of(users, user)
        assert found is not None
        assert same(found, make_start())

    async def test_the_first_one_holds(self, users: UserStore, decisions: DecisionStore, user: str) -> None:
        for version in (1, 2):
            await decisions.put(decided(user, f"d{version}"), start=make_start(version=version))
        found = await start_of(users, user)
        assert found is not None
        assert found.version == 1

    async def test_none_for_one_of_whom_something_was_learned(
        self, redis: Redis, keys, users: UserStore, stream: EventStream, decisions, user, make_event, make_state
    ) -> None:
        await learn(stream, users, make_state(user, 1), make_event(user, "e"))
        await decisions.put(decided(user, "d"), start=make_start())
        assert not await redis.exists(keys.start(user))

    async def test_none_in_another_incarnation(self, redis: Redis, keys, users: UserStore, decisions, user) -> None:
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
    async def test_forgetting_takes_it(self, redis: Redis, keys, users: UserStore, decisions, user: str) -> None:
        await decisions.put(decided(user, "d"), start=make_start())
        await users.forget(user)
        assert not await redis.exists(keys.start(user))

    async def test_one_of_another_incarnation_is_none_and_gives_way(
        self, redis: Redis, keys, users: UserStore, decisions, user: str
    ) -> None:
        await redis.hset(keys.start(user), mapping={"incarnation": "4", "start": make_start().encode()})
        assert await start_of(users, user) is None
        await decisions.put(decided(user, "d"), start=make_start(version=9))
        found = await start_of(users, user)
        assert found is not None
        assert (found.version, found.incarnation) == (9, 0)

    async def test_a_damaged_one_is_none_and_the_log_names_nobody(
        self, redis: Redis, keys, users: UserStore, neighbours: list[str], decisions, caplog
    ) -> None:
        one, two = neighbours[:2]
        await redis.hset(keys.start(one), mapping={"incarnation": "0", "start": b"damaged"})
        await decisions.put(decided(two, "d"), start=make_start())
        with caplog.at_level(logging.ERROR):
            _, starts = await users.load_with_starts([one, two])
        assert list(starts) == [two]
        assert "cannot be read" in caplog.text
        assert one not in caplog.text

    async def test_who_was_forgotten_since(
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
