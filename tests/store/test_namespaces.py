"""Namespaces: created once, completed after an interruption, and never confused with those of another store."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from metaban.store.errors import CorruptRecord, NamespaceConflict, StoreReset
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.reward_rules import RewardRules


async def open_shop(redis: Redis, partitions: int = 2, seed: int = 7) -> NamespaceRecord:
    return await NamespaceStore(redis).open_or_create("shop", partitions=partitions, seed=seed, learner={"a": [1]})


async def test_created_once(redis: Redis):
    assert await NamespaceStore(redis).load("shop") is None
    first = await open_shop(redis)
    assert (first.state, first.layout, first.seed, first.learner) == ("ready", None, 7, {"a": [1]})
    assert await open_shop(redis, seed=8) == first
    assert await NamespaceStore(redis).load("shop") == first
    for partition in range(2):
        assert await redis.get(first.keys.marker(partition)) == first.store_id.encode()
        assert len(await redis.xinfo_groups(first.keys.events(partition))) == 1


async def test_racing_creators_agree(redis: Redis):
    records = await asyncio.gather(*(open_shop(redis, seed=n) for n in range(8)))
    assert len({record.store_id for record in records}) == 1
    assert len({record.seed for record in records}) == 1
    assert {record.state for record in records} == {"ready"}


@pytest.mark.parametrize("markers", [0, 1, 3])
async def test_interrupted_creation_is_completed(redis: Redis, markers: int):
    half = NamespaceRecord("shop", 3, "e" * 32, 1, {}, None, 0, "creating")
    await redis.set(half.keys.record, half.encode())
    for partition in range(markers):
        await redis.set(half.keys.marker(partition), half.store_id)
    if markers:
        await redis.xgroup_create(half.keys.events(0), "learners", "0", mkstream=True)
    record = await open_shop(redis, partitions=3)
    assert record == replace(half, state="ready", revision=1)
    assert await open_shop(redis, partitions=3) == record
    for partition in range(3):
        assert await redis.get(half.keys.marker(partition)) == half.store_id.encode()
        assert len(await redis.xinfo_groups(half.keys.events(partition))) == 1


@pytest.mark.parametrize("state", ["creating", "ready"])
async def test_foreign_marker(redis: Redis, state):
    record = await open_shop(redis)
    await redis.set(record.keys.record, replace(record, state=state).encode())
    await redis.set(record.keys.marker(1), "another store")
    with pytest.raises(StoreReset):
        await open_shop(redis)


async def test_missing_marker(redis: Redis):
    record = await open_shop(redis)
    await redis.delete(record.keys.marker(1))
    with pytest.raises(StoreReset):
        await open_shop(redis)


async def test_partitions_are_fixed(redis: Redis):
    await open_shop(redis, partitions=2)
    with pytest.raises(NamespaceConflict):
        await open_shop(redis, partitions=3)


async def test_first_layout_wins(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    layouts = [{"dim": n} for n in range(8)]
    answers = await asyncio.gather(*(namespaces.set_layout(record, layout) for layout in layouts))
    stored = await namespaces.load("shop")
    assert stored is not None
    assert stored.layout in layouts
    assert all(answer == stored for answer in answers)


async def test_layout_after_another_change(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    changed = await namespaces.replace_learner(record, {"b": 2})
    answer = await namespaces.set_layout(record, {"dim": 3})  # read before the change
    assert (answer.layout, answer.learner, answer.revision) == ({"dim": 3}, {"b": 2}, changed.revision + 1)


async def test_layout_is_reset_only_without_events(redis: Redis, make_event):
    namespaces = NamespaceStore(redis)
    record = await namespaces.set_layout(await open_shop(redis), {"dim": 3})
    record = await namespaces.set_layout(record, {"dim": 4})
    assert record.layout == {"dim": 4}
    stream = EventStream(redis, record.keys, dedupe_window_s=60, backlog_limit=10)
    await stream.enqueue([make_event("u", "e")])
    assert await namespaces.set_layout(record, {"dim": 4}) == record
    with pytest.raises(NamespaceConflict):
        await namespaces.set_layout(record, {"dim": 5})


async def test_replace_learner_compares(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    changed = await namespaces.replace_learner(record, {"b": 2})
    assert await namespaces.load("shop") == changed
    with pytest.raises(NamespaceConflict):
        await namespaces.replace_learner(record, {"c": 3})


async def test_changes_after_flushall(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    await redis.flushall()
    with pytest.raises(StoreReset):
        await namespaces.set_layout(record, {"dim": 3})
    again = await open_shop(redis)
    assert again.store_id != record.store_id
    with pytest.raises(StoreReset):
        await namespaces.replace_learner(record, {})


@pytest.mark.parametrize("blob", [b"", b"[]", b"null", b'{"name": "shop"}', b"\xff", b'{"name":3}', b"[" * 100_000])
async def test_corrupt_record(redis: Redis, blob: bytes):
    await redis.set(NamespaceKeys("shop", 1).record, blob)
    with pytest.raises(CorruptRecord):
        await NamespaceStore(redis).load("shop")


async def test_record_with_wrong_fields(redis: Redis):
    record = await open_shop(redis)
    for change in ({"state": "new"}, {"partitions": 0}, {"layout": 3}, {"seed": "x"}, {"name": "NO"}):
        blob = replace(record, **change).encode()
        with pytest.raises(CorruptRecord):
            NamespaceRecord.decode(blob)


async def test_names_are_listed_from_creation_to_deletion(redis: Redis):
    namespaces = NamespaceStore(redis)
    assert await namespaces.names() == []
    record = await open_shop(redis)
    await namespaces.open_or_create("books", partitions=1, seed=0, learner={}, overrides={"epsilon": 0.1})
    assert await namespaces.names() == ["books", "shop"]
    await namespaces.delete(record)
    assert await namespaces.names() == ["books"]
    books = await namespaces.load("books")
    assert books is not None
    assert books.overrides == {"epsilon": 0.1}


async def test_a_deleted_namespace_leaves_its_record_and_nothing_else(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    near = await namespaces.open_or_create("shop-2", partitions=2, seed=0, learner={})
    await redis.set(record.keys.user("u"), "anything")
    await redis.set(near.keys.user("u"), "anything")
    await namespaces.delete(record)
    left = [key async for key in redis.scan_iter("metaban:{shop:*")]
    assert left == [record.keys.record.encode()]
    kept = await namespaces.load("shop")
    assert kept is not None
    assert kept.state == "deleted"
    assert await redis.get(near.keys.user("u")) == b"anything"
    assert await namespaces.open(near) == near
    await namespaces.delete(kept)  # a second deletion changes nothing


def test_deletion_covers_every_shared_key():
    keys = NamespaceKeys("shop", 1)
    names = [name for name, kind in vars(NamespaceKeys).items() if isinstance(kind, property)]
    meta = [getattr(keys, name) for name in names if isinstance(getattr(keys, name), str)]
    assert {key for key in meta if ":meta}:" in key} == {keys.record, *keys.shared}


async def test_a_late_deletion_does_not_affect_a_new_namespace_of_the_name(redis: Redis):
    namespaces = NamespaceStore(redis)
    first = await open_shop(redis, partitions=3)
    await namespaces.delete(first)
    tombstone = await namespaces.load("shop")
    assert tombstone is not None
    second = await open_shop(redis, partitions=2)
    await redis.set(second.keys.user("u"), "anything")
    await redis.hset(second.keys.arms, "a", "[1]")
    await redis.set(first.keys.user("v") if first.keys.partition_of("v") == 2 else "metaban:{shop:p02}:user:v", "old")
    before = {key async for key in redis.scan_iter("metaban:{shop:*")}
    await namespaces.delete(tombstone)  # by a process that was delayed for long
    after = {key async for key in redis.scan_iter("metaban:{shop:*")}
    assert before - after == {b"metaban:{shop:p02}:user:v"}  # a partition that no longer exists
    assert await namespaces.load("shop") == second
    assert await namespaces.names() == ["shop"]
    assert await namespaces.open(second) == second


async def test_a_deleted_namespace_is_not_changed(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    assert await namespaces.reload(record) == record
    await namespaces.delete(record)
    with pytest.raises(StoreReset):
        await namespaces.reload(record)
    for change in (
        namespaces.set_layout(record, {"dim": 1}),
        namespaces.replace_learner(record, {"b": 1}),
        namespaces.fill(record, learner={}, rewards=RewardRules(wait_s=3)),
        namespaces.change(record, overrides={"alpha": 1}),
    ):
        with pytest.raises(StoreReset):
            await change
    kept = await namespaces.load("shop")
    assert kept is not None
    assert (kept.state, kept.layout, kept.overrides) == ("deleted", None, {})
    again = await open_shop(redis)
    with pytest.raises(StoreReset):
        await namespaces.reload(record)
    assert await namespaces.reload(again) == again


async def test_a_name_is_free_again_after_deletion(redis: Redis):
    namespaces = NamespaceStore(redis)
    first = await open_shop(redis)
    await namespaces.delete(first)
    records = await asyncio.gather(*(open_shop(redis, partitions=3, seed=n) for n in range(4)))
    assert len({record.store_id for record in records}) == 1
    assert records[0].store_id != first.store_id
    assert records[0].revision > first.revision
    assert await namespaces.names() == ["shop"]
    with pytest.raises(StoreReset):
        await namespaces.replace_learner(first, {"b": 1})


async def test_a_concurrent_change_is_not_overwritten(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    changed = await namespaces.change(record, overrides={"alpha": 1.0})
    assert changed is not None
    assert await namespaces.load("shop") == changed
    assert await namespaces.change(record, overrides={"alpha": 2.0}) is None
    assert await namespaces.load("shop") == changed


async def test_an_incomplete_record_is_filled_in_once(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    assert record.reward_rules == RewardRules()
    assert b"rewards" not in await redis.get(record.keys.record), "as an older version stored it"
    rules = [RewardRules(wait_s=n + 1) for n in range(4)]
    fills = [namespaces.fill(record, learner={"a": 0, "b": n}, rewards=each) for n, each in enumerate(rules)]
    _, *filled = await asyncio.gather(namespaces.set_layout(record, {"dim": 1}), *fills)
    stored = await namespaces.load("shop")
    assert stored is not None
    assert stored.layout == {"dim": 1}
    first = rules.index(stored.reward_rules)
    assert stored.learner == {"a": [1], "b": first}, "what is stored stays; all added values are of one caller"
    assert {(each.reward_rules, each.learner["b"]) for each in filled} == {(rules[first], first)}
    assert await namespaces.fill(stored, learner={"b": 9}, rewards=RewardRules()) is stored


async def test_older_reward_rules_keep_their_values(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await open_shop(redis)
    patient = {"repeated": "last", "reward_min": -1, "reward_max": 1, "default_reward": 0, "wait_s": 700_000}
    older = await namespaces.change(record, rewards=patient)
    assert older is not None
    assert older.reward_rules.wait_s == 700_000, "it is readable with the default windows, which are shorter"
    with pytest.raises(NamespaceConflict, match="longer than the reward window"):
        await namespaces.fill(older, learner={}, rewards=RewardRules())
    windows = RewardRules(window_s=800_000, dedupe_window_s=900_000)
    filled = await namespaces.fill(older, learner={}, rewards=windows)
    assert filled.rewards == {**patient, "window_s": 800_000, "dedupe_window_s": 900_000}


@pytest.mark.parametrize("rewards", [[], 3, {"repeated": "never"}, {"other": 1}, {"reward_max": 0}])
async def test_invalid_stored_rules_are_reported_as_corrupt(redis: Redis, rewards):
    record = await open_shop(redis)
    fields = {**json.loads(record.encode()), "rewards": rewards}
    with pytest.raises(CorruptRecord):
        NamespaceRecord.decode(json.dumps(fields).encode())
