"""Arms waiting for a default reward: registered once with the decision, or at its activation when deferred."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.decisions.decisions import BASELINE, OVERDUE_GRACE_MS, DecisionRecord, DecisionStore
from metaban.store.decisions.default_rewards import AwaitedReward, AwaitedRewardStore
from metaban.store.errors import StoreError
from metaban.store.keys import NamespaceKeys
from tests.store.helpers import make_decision, same

WINDOW_MS = 50_000


@pytest.fixture
def decisions(client: Redis, keys: NamespaceKeys) -> DecisionStore:
    return DecisionStore(client, keys, ttl_s=60)


@pytest.fixture
def awaiting(client: Redis, keys: NamespaceKeys) -> AwaitedRewardStore:
    return AwaitedRewardStore(client, keys)


async def scores(redis: Redis, keys: NamespaceKeys) -> dict[bytes, float]:
    """All waiting members with their due time."""
    found: dict[bytes, float] = {}
    for partition in range(keys.partitions):
        found |= dict(await redis.zrange(keys.awaiting(partition), 0, -1, withscores=True))
    return found


def deferred(decision_id: str = "d1") -> DecisionRecord:
    return replace(make_decision(decision_id), deferred=True)


async def test_every_arm_waits_separately(redis: Redis, keys: NamespaceKeys, decisions: DecisionStore) -> None:
    decision = make_decision("a:b")
    assert await decisions.put(decision, overdue_ms=9_000) is decision
    assert await scores(redis, keys) == {b"1:a:b": 9_000, b"2:a:b": 9_000}
    assert 0 < await redis.pttl(keys.decision("a:b")) <= 9_000 - 1_234 + OVERDUE_GRACE_MS


async def test_without_a_default_reward_nothing_waits(
    redis: Redis, keys: NamespaceKeys, decisions: DecisionStore
) -> None:
    await decisions.put(make_decision())
    await decisions.put(replace(make_decision("base"), policy=BASELINE), overdue_ms=9_000)
    assert await scores(redis, keys) == {}


async def test_a_decision_outlives_its_wait(redis: Redis, keys: NamespaceKeys, client: Redis) -> None:
    decisions = DecisionStore(client, keys, ttl_s=1)
    await decisions.put(make_decision(), overdue_ms=1_234 + 100_000)
    assert await redis.pttl(keys.decision("d1")) > 100_000 + OVERDUE_GRACE_MS - 10_000


async def test_a_second_record_of_an_id_registers_nothing(
    redis: Redis, keys: NamespaceKeys, decisions: DecisionStore
) -> None:
    answers = await asyncio.gather(
        *(decisions.put(make_decision("d", f"{n:02x}"), overdue_ms=1_000 + n) for n in range(8))
    )
    stored = await decisions.get("d")
    assert all(same(stored, answer) for answer in answers)
    assert stored is not None
    due = 1_000 + int(stored.fingerprint, 16)
    assert await scores(redis, keys) == {b"1:d": due, b"2:d": due}


async def test_nothing_is_stored_beside_a_key_of_another_type(
    redis: Redis, keys: NamespaceKeys, decisions: DecisionStore
) -> None:
    for partition in range(keys.partitions):
        await redis.set(keys.awaiting(partition), "text")
    with pytest.raises(StoreError):
        await decisions.put(make_decision(), overdue_ms=1)
    assert await decisions.get("d1") is None
    await decisions.put(deferred("d2"))
    with pytest.raises(StoreError):
        await decisions.activate("d2", 2_000, window_ms=WINDOW_MS, overdue_ms=3_000)
    stored = await decisions.get("d2")
    assert stored is not None
    assert not stored.active


async def test_taking_and_settling(redis: Redis, keys: NamespaceKeys, decisions: DecisionStore) -> None:
    awaiting = AwaitedRewardStore(redis, keys)
    for number in range(10):
        await decisions.put(make_decision(f"d{number}"), overdue_ms=1_000 + number)
    everything = await scores(redis, keys)
    for now_ms in (999, 1_000, 1_004, 2_000):
        due = {member for member, score in everything.items() if score <= now_ms}
        found = [await awaiting.overdue(partition, now_ms, count=99) for partition in range(keys.partitions)]
        assert {member for members in found for member in members} == due
        for members in found:
            assert [everything[member] for member in members] == sorted(everything[member] for member in members)
        partitions = [place for place, members in enumerate(found) if members]
        assert await awaiting.any_overdue(range(keys.partitions), now_ms) == partitions
        assert await awaiting.any_overdue(partitions[:1], now_ms) == partitions[:1]
    first = keys.partition_of("d0")
    assert await awaiting.overdue(first, 2_000, count=1) == [b"1:d0"]
    await awaiting.settle(first, [b"1:d0"])
    await awaiting.settle(first, [])
    await awaiting.settle_all([AwaitedReward("d1", 2), AwaitedReward("d2", 1), AwaitedReward("never", 1)])
    await awaiting.settle_all([])
    assert await scores(redis, keys) == {
        member: score for member, score in everything.items() if member not in (b"1:d0", b"2:d1", b"1:d2")
    }


@pytest.mark.parametrize("member", [b"", b"1", b":d", b"0:d", b"-1:d", b"1e3:d", b"1:", b"9999999999:d", b"1:\xff"])
def test_invalid_members_are_refused(member: bytes) -> None:
    assert AwaitedReward.decode(member) is None


@pytest.mark.parametrize("awaited", [AwaitedReward("d", 1), AwaitedReward("1:2:3", 100), AwaitedReward("a\nb", 7)])
def test_members_round_trip(awaited: AwaitedReward) -> None:
    assert AwaitedReward.decode(awaited.encode().encode()) == awaited


class TestActivation:
    async def test_the_wait_starts_at_the_activation(
        self, redis: Redis, keys: NamespaceKeys, decisions: DecisionStore
    ) -> None:
        await decisions.put(deferred())
        stored = await decisions.get("d1")
        assert stored is not None
        assert (stored.active, stored.since_ms) == (False, 1_234)
        assert await scores(redis, keys) == {}
        await redis.pexpire(keys.decision("d1"), 20_000)
        activated = await decisions.activate("d1", 5_000, window_ms=WINDOW_MS, overdue_ms=7_000)
        assert activated is not None
        assert (activated.active, activated.since_ms, activated.activated_ms) == (True, 5_000, 5_000)
        assert same(await decisions.get("d1"), activated)
        assert np.array_equal(activated.features, make_decision().features)
        assert await scores(redis, keys) == {b"1:d1": 7_000, b"2:d1": 7_000}
        # as long as for a decision made now
        assert await redis.pttl(keys.decision("d1")) > 55_000

    async def test_a_second_activation_changes_nothing(
        self, redis: Redis, keys: NamespaceKeys, decisions: DecisionStore
    ) -> None:
        await decisions.put(deferred())
        await decisions.activate("d1", 5_000, window_ms=WINDOW_MS, overdue_ms=7_000)
        before = await redis.get(keys.decision("d1"))
        again = await decisions.activate("d1", 6_000, window_ms=WINDOW_MS, overdue_ms=8_000)
        assert again is not None
        assert again.activated_ms == 5_000
        assert await redis.get(keys.decision("d1")) == before
        assert set((await scores(redis, keys)).values()) == {7_000}

    async def test_of_racing_activations_the_first_counts(
        self, redis: Redis, keys: NamespaceKeys, decisions: DecisionStore
    ) -> None:
        await decisions.put(deferred())
        answers = await asyncio.gather(
            *(decisions.activate("d1", 2_000 + n, window_ms=WINDOW_MS, overdue_ms=3_000 + n) for n in range(8))
        )
        stored = await decisions.get("d1")
        assert stored is not None
        assert stored.activated_ms is not None
        assert {answer.activated_ms for answer in answers if answer} == {stored.activated_ms}
        assert set((await scores(redis, keys)).values()) == {stored.activated_ms + 1_000}

    async def test_activation_of_a_decision_that_was_not_deferred(
        self, redis: Redis, keys: NamespaceKeys, decisions: DecisionStore
    ) -> None:
        await decisions.put(make_decision())
        found = await decisions.activate("d1", 5_000, window_ms=WINDOW_MS, overdue_ms=7_000)
        assert found is not None
        assert (found.since_ms, found.activated_ms) == (1_234, None)
        assert await scores(redis, keys) == {}

    async def test_activation_of_an_expired_decision(self, decisions: DecisionStore) -> None:
        assert await decisions.activate("never", 5_000, window_ms=WINDOW_MS) is None
        await decisions.put(deferred())
        assert await decisions.activate("d1", 1_234 + WINDOW_MS + 1, window_ms=WINDOW_MS) is None
        stored = await decisions.get("d1")
        assert stored is not None
        assert not stored.active
        assert await decisions.activate("d1", 1_234 + WINDOW_MS, window_ms=WINDOW_MS) is not None

    async def test_activation_without_a_default_reward(
        self, redis: Redis, keys: NamespaceKeys, decisions: DecisionStore
    ) -> None:
        await decisions.put(deferred())
        assert await decisions.activate("d1", 5_000, window_ms=WINDOW_MS) is not None
        assert await scores(redis, keys) == {}
        assert 0 < await redis.pttl(keys.decision("d1")) <= 60_000


async def test_loading_many(redis: Redis, keys: NamespaceKeys, decisions: DecisionStore) -> None:
    await decisions.put(make_decision("a"))
    await redis.set(keys.decision("damaged"), "text")
    found = await decisions.load(["a", "never", "damaged", "a"])
    assert list(found) == ["a"]
    assert same(found["a"], make_decision("a"))
