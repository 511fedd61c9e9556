"""Remnants of a user: found wherever they are, deleted, and never those of another user."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.decisions import index as decision_index
from metaban.store.decisions.decisions import BASELINE, DecisionStore
from metaban.store.errors import FenceLost, StoreError
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceRecord
from metaban.store.shared.epochs import Epoch, EpochStore
from metaban.store.users import forgetting as traces
from metaban.store.users.forgetting import RemnantStore
from metaban.store.users.profiles import ProfileMemo, ProfileStore, encode_profile
from metaban.store.users.users import UserStore
from tests.store.helpers import MakeEvent, MakeState, decided, learn

#: Time of `make_decision`, and how long its decisions accept rewards.
DECIDED_MS = 1_234
WINDOW_MS = 1_000


async def open_ids(decisions: DecisionStore, user: str, *, most: int, now_ms: int = DECIDED_MS) -> list[str]:
    return [each.decision_id for each in await decisions.open_of(user, now_ms, window_ms=WINDOW_MS, most=most)]


@pytest.fixture
def decisions(redis: Redis, keys: NamespaceKeys) -> DecisionStore:
    return DecisionStore(redis, keys, ttl_s=60)


@pytest.fixture
def user(neighbours: list[str]) -> str:
    return neighbours[0]


def test_event_keys_contain_no_user_id(keys: NamespaceKeys) -> None:
    assert "ann" not in keys.seen("ann", "ann:1")
    assert len({keys.seen("a", "b"), keys.seen("ab", ""), keys.seen("", "ab"), keys.seen("a", "b1")}) == 4
    assert keys.seen("ann", "1").startswith(keys.events(keys.partition_of("ann")).removesuffix("events"))


class TestDecisions:
    async def test_decisions_are_listed_until_they_expire(
        self, redis: Redis, keys, decisions: DecisionStore, user: str
    ):
        await DecisionStore(redis, keys, ttl_s=0.05).put(decided(user, "short"))
        for name in ("one", "two"):
            await decisions.put(decided(user, name))
        await asyncio.sleep(0.1)
        assert await open_ids(decisions, user, most=9) == ["two", "one"]
        assert await open_ids(decisions, user, most=1) == ["two"]
        await decisions.put(decided(user, "three"))
        assert await redis.zcard(keys.decided(user)) == 3, "expired decisions are dropped when the list grows"

    async def test_decisions_without_rewards_are_kept_and_not_listed(self, decisions: DecisionStore, user: str):
        for decision in (
            decided(user, "late"),
            replace(decided(user, "open"), created_ms=DECIDED_MS + 500),
            replace(decided(user, "deferred"), created_ms=DECIDED_MS + 600, deferred=True),
            replace(decided(user, "activated"), deferred=True, activated_ms=DECIDED_MS + 700),
            replace(decided(user, "of the baseline"), created_ms=DECIDED_MS + 800, policy=BASELINE),
        ):
            await decisions.put(decision)
        end_ms = DECIDED_MS + WINDOW_MS
        found = await decisions.open_of(user, end_ms + 1, window_ms=WINDOW_MS, most=9)
        assert {each.decision_id: each.expires_ms for each in found} == {
            "open": end_ms + 500,
            "activated": end_ms + 700,
            "deferred": end_ms + 600,
        }
        assert "late" in await open_ids(decisions, user, most=9, now_ms=end_ms)
        assert await open_ids(decisions, user, most=9, now_ms=end_ms + 701) == []
        assert await decisions.keeps_any_of(user)

    async def test_a_shorter_window_loses_no_decision(self, redis: Redis, keys, decisions: DecisionStore, user: str):
        """The reward window was shortened: earlier decisions live longer than new ones."""
        await decisions.put(decided(user, "long"))
        await DecisionStore(redis, keys, ttl_s=0.05).put(decided(user, "short"))
        assert await redis.pttl(keys.decided(user)) > 50_000
        await asyncio.sleep(0.1)
        assert await decisions.forget_of(user, 1) == 1
        assert not await redis.exists(keys.decision("long"))

    async def test_the_list_expires_with_its_last_decision(self, redis: Redis, keys, user: str):
        await DecisionStore(redis, keys, ttl_s=0.05).put(decided(user, "d"))
        await asyncio.sleep(0.1)
        assert not await redis.exists(keys.decided(user))

    async def test_all_decisions_of_the_user_and_no_others_are_deleted(
        self, redis: Redis, keys, users: UserStore, decisions: DecisionStore, neighbours, monkeypatch
    ):
        monkeypatch.setattr(decision_index, "DECISIONS_READ", 3)
        one, two = neighbours[:2]
        for number in range(10):
            await decisions.put(decided(one, f"of one {number}"))
            await decisions.put(decided(two, f"of two {number}"))
        await redis.set(keys.decision("of one 4"), b"damaged")
        await redis.delete(keys.decision("of one 5"))
        await users.forget(one)
        await decisions.put(decided(one, "since", incarnation=1))
        assert await decisions.count_of(one, 1) == 9
        assert await decisions.forget_of(one, 1) == 9
        assert (await decisions.count_of(one, 1), await decisions.forget_of(one, 1)) == (0, 0)
        assert await open_ids(decisions, one, most=99) == ["since"]
        assert len(await open_ids(decisions, two, most=99)) == 10
        assert await redis.zrange(keys.decided(one), 0, -1) == [b"since"]

    async def test_a_decision_for_another_incarnation(
        self, redis: Redis, keys, users: UserStore, decisions: DecisionStore, user: str
    ):
        await users.forget(user)
        for incarnation in (0, 2):  # 2: the store has lost that the user was forgotten once more
            with pytest.raises(FenceLost) as refused:
                await decisions.put(decided(user, "d", incarnation=incarnation), profile=b"[1]")
            assert refused.value.reason == "incarnation"
            assert await decisions.get("d") is None
        assert not await redis.exists(keys.decided(user), keys.profile(user))
        assert (await decisions.put(decided(user, "d", incarnation=1))).incarnation == 1

    async def test_an_existing_record_of_an_earlier_incarnation_is_ignored(
        self, users: UserStore, decisions: DecisionStore, user: str
    ):
        """The process that stored it is about to take it back, or was killed."""
        await decisions.put(decided(user, "d"))
        await users.forget(user)
        with pytest.raises(FenceLost):
            await decisions.put(decided(user, "d", incarnation=1))
        second = decided(user, "d", incarnation=1)
        assert await decisions.put(second) is second

    async def test_a_decision_id_of_another_user(self, redis: Redis, keys, users, decisions: DecisionStore, neighbours):
        one, two = neighbours[:2]
        first = decided(one, "d")
        await decisions.put(first)
        assert (await decisions.put(decided(two, "d"))).user_id == one
        assert await open_ids(decisions, two, most=9) == []
        # Also when a killed process left the note behind.
        await redis.zadd(keys.decided(two), {"d": 2e12})
        assert await open_ids(decisions, two, most=9) == []
        assert not await decisions.keeps_any_of(two)
        await users.forget(two)
        assert await decisions.forget_of(two, 1) == 0
        assert await decisions.get("d") is not None

    async def test_a_decision_that_changes_during_the_deletion(
        self, redis: Redis, keys, decisions: DecisionStore, user: str
    ):
        record = decided(user, "d").encode()
        index = decision_index.DecisionIndex(redis, keys)
        await decisions.put(decided(user, "d"))
        assert not await index.retract("d", record + b" ")
        changed = replace(decided(user, "d"), policy="another").encode()
        await redis.set(keys.decision("d"), changed)
        assert await index.retract_latest("d", record, lambda record: True)
        assert not await redis.exists(keys.decision("d"))

    async def test_forgetting_and_deciding_race(
        self, redis: Redis, keys, users: UserStore, decisions: DecisionStore, user: str
    ):
        """In every interleaving, no earlier decision is left."""
        for incarnation in range(1, 15):

            async def decide(number: int, of: int = incarnation - 1) -> None:
                await asyncio.sleep(number / 5_000)
                with_profile = decided(user, f"{of}-{number}", incarnation=of)
                with suppress(FenceLost):
                    await decisions.put(with_profile, profile=b"[1]")

            async def forget() -> None:
                await asyncio.sleep(0.001)
                await decisions.forget_of(user, (await users.forget(user)).incarnation)

            await asyncio.gather(forget(), *(decide(number) for number in range(12)))
            assert [key async for key in redis.scan_iter("*:decision:*")] == []
            assert not await redis.exists(keys.decided(user), keys.profile(user))

    @pytest.mark.parametrize("spoiled", ["decided", "versions"])
    async def test_a_key_of_another_type(self, redis: Redis, keys, decisions: DecisionStore, user: str, spoiled: str):
        key = keys.decided(user) if spoiled == "decided" else keys.versions(0)
        await redis.set(key, "spoiled")
        with pytest.raises(StoreError):
            await decisions.put(decided(user, "d"), profile=b"[1]")
        assert not await redis.exists(keys.profile(user))


class TestStreams:
    async def test_events_dead_letters_and_log_lines_are_found(
        self,
        redis: Redis,
        keys: NamespaceKeys,
        stream: EventStream,
        users: UserStore,
        make_event: MakeEvent,
        make_state: MakeState,
        neighbours: list[str],
        monkeypatch,
    ):
        monkeypatch.setattr(traces, "SEARCH_BATCH", 3)
        one, two = neighbours[:2]
        for name in (one, two):
            await learn(stream, users, make_state(name, 1), make_event(name, "a"))
        await stream.enqueue([make_event((one, two)[number % 2], f"buried {number}") for number in range(10)])
        for delivery in await stream.read([0], "one", count=99, block_ms=0):
            await stream.letters.bury(delivery, "one", "hopeless")
        waiting = await stream.enqueue([make_event((one, two)[number % 2], f"waits {number}") for number in range(10)])
        forgotten = await users.forget(one)
        [since] = await stream.enqueue([make_event(one, "since", incarnation=1)])
        found = RemnantStore(redis, keys)

        left = await found.events(one, 1)
        assert left == [entry.entry_id for entry in waiting[0::2]]
        assert await found.events_left(one, left) == left
        await redis.xdel(keys.events(0), *left[:2])
        assert await found.events_left(one, left) == left[2:]
        assert since.entry_id not in left

        assert (await found.letters(one, 1), await found.lines(one, 1)) == (5, 1)
        assert await found.delete_letters(keys.partition_of(one), {one: 1}) == 5
        assert await found.delete_lines(one, 1, before=forgotten.line) == 1
        assert (await found.letters(one, 1), await found.lines(one, 1)) == (0, 0)
        assert (await found.letters(two, 1), await found.lines(two, 1)) == (5, 1)
        assert [line.user_id for line in await users.tail(0, "0-0", block_ms=0, count=9)] == [two, one]

    async def test_invalid_entries_are_not_deleted(self, redis: Redis, keys, user: str):
        for fields in ({"x": user}, {"u": "another"}, {"i": "no number", "u": user}):
            await redis.xadd(keys.dead_letters(0), fields)
        assert await RemnantStore(redis, keys).letters(user, 1) == 1
        assert await RemnantStore(redis, keys).events(user, 1) == []

    async def test_an_event_that_fails_after_forgetting(
        self, redis: Redis, keys, stream: EventStream, users: UserStore, make_event, neighbours
    ):
        """No letter keeps a forgotten event; events of the current incarnation and of other users are kept."""
        one, two = neighbours[:2]
        await stream.enqueue([make_event(one, "a"), make_event(two, "b")])
        await users.forget(one)
        await stream.enqueue([make_event(one, "c", incarnation=1)])
        for delivery in await stream.read([0], "one", count=9, block_ms=0):
            await stream.letters.bury(delivery, "one", "hopeless")
        letters = (await stream.letters.page(limit=9, newest_first=False)).letters
        assert [letter.event.event_id for letter in letters if letter.event] == ["b", "c"]
        counters = await users.counters()
        assert (counters["enqueued"], counters["voided"], counters["buried"]) == (3, 1, 2)
        assert (await stream.backlog(), await stream.pending(0)) == (0, 0)


class TestMembers:
    async def test_members_of_the_epoch_are_removed(self, redis: Redis, record: NamespaceRecord):
        epochs = EpochStore(redis, record.keys, record.store_id)
        assert (await epochs.members(), await epochs.strike(["ann"])) == ((), 0)
        await epochs.acquire_lease("me", 60_000)
        names = ("ann", "bø", 'a "quote" / \\', "{x}")
        assert await epochs.publish(Epoch(0, 5, {"mu": np.ones(2)}, names, 7), lease_token="me")
        blob = await redis.hget(record.keys.epoch, "blob")
        assert b"ann" not in blob
        identity = await epochs.current_identity()
        assert await epochs.strike(["bø", "nobody"]) == 1
        assert await epochs.members() == ("ann", 'a "quote" / \\', "{x}")
        assert await epochs.strike(names) == 3
        current = await epochs.current()
        assert current is not None
        assert (current.members, current.tensors["mu"].tolist()) == ((), [1.0, 1.0])
        assert await epochs.current_identity() == identity

    async def test_members_in_an_older_format(self, redis: Redis, record: NamespaceRecord):
        """The members are inside the blob."""
        epochs = EpochStore(redis, record.keys, record.store_id)
        old = Epoch(3, 5, {"mu": np.ones(2)}, ("ann", "bob"), 7)
        await redis.hset(record.keys.epoch, mapping={"number": 3, "blob": old.encode()})
        assert await epochs.members() == ("ann", "bob")
        current = await epochs.current()
        assert current is not None
        assert current.members == ("ann", "bob")


class TestProfiles:
    async def test_round_trip(self, redis: Redis, keys, decisions: DecisionStore, user: str):
        profiles = ProfileStore(redis, keys)
        assert await profiles.get(user) is None
        features = {"größe": 1.5, "kind": "a", "new": True}
        await decisions.put(decided(user, "d"), profile=encode_profile(features))
        assert await profiles.get(user) == features
        assert json.loads(encode_profile([1.0, -2.5])) == [1.0, -2.5]

    def test_the_cache_of_profiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memo = ProfileMemo()
        assert memo.news("ann", 0, b"[1]") == b"[1]"
        assert memo.news("ann", 0, b"[1]") == b"[1]", "not cached before it is stored"
        memo.stored("ann", 0, b"[1]")
        assert memo.news("ann", 0, b"[1]") == b""
        assert (memo.news("ann", 1, b"[1]"), memo.news("ann", 0, b"[2]")) == (b"[1]", b"[2]")
        monkeypatch.setattr("metaban.store.users.profiles.REMEMBERED_S", -1.0)
        assert memo.news("ann", 0, b"[1]") == b"[1]", "the cache expires, since other processes write too"
        monkeypatch.setattr("metaban.store.users.profiles.REMEMBERED_MAX", 2)
        for name in ("bob", "cid"):
            memo.stored(name, 0, b"[1]")
        assert list(memo.entries) == ["bob", "cid"]
