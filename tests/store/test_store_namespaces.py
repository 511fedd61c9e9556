"""Namespaces: created once, completed when interrupted, and never mistaken for those of another store."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from store.errors import CorruptRecord, NamespaceConflict, StoreReset
from store.events import EventStream
from store.keys import NamespaceKeys
from store.namespaces import NamespaceRecord, Namespaces
from store.reward_rules import RewardRules


async def open_shop(redis: Redis, partitions: int = 2, seed: int = 7) -> NamespaceRecord:
    return await Namespaces(redis).open_or_create("shop", partitions=partitions, seed=seed, learner={"a": [1]})


async def test_created_once(redis: Redis):
    assert await Namespaces(redis).load("shop") is None
    first = await open_shop(redis)
    assert (first.state, first.layout, first.seed, first.learner) == ("ready", None, 7, {"a": [1]})
    assert await open_shop(redis, seed=8) == first
    assert await Namespaces(redis).load("shop") == first
    for partition in range(2):
        assert await redis.get(first.keys.marker(partition)) == first.store_epoch.encode()
        assert len(await redis.xinfo_groups(first.keys.events(partition))) == 1


async def test_racing_creators_agree(redis: Redis):
    records = await asyncio.gather(*(open_shop(redis, seed=n) for n in range(8)))
    assert len({record.store_epoch for record in records}) == 1
    assert len({record.seed for record in records}) == 1
    assert {record.state for record in records} == {"ready"}


@pytest.mark.parametrize("markers", [0, 1, 3])
async def test_interrupted_creation_is_completed(redis: Redis, markers: int):
    half = NamespaceRecord("shop", 3, "e" * 32, 1, {}, None, 0, "creating")
    await redis.set(half.keys.record, half.encode())
    for partition in range(markers):
        await redis.set(half.keys.marker(partition), half.store_epoch)
    if markers:
        await redis.xgroup_create(half.keys.events(0), "learners", "0", mkstream=True)
    record = await open_shop(redis, partitions=3)
    assert record == replace(half, state="ready", revision=1)
    assert await open_shop(redis, partitions=3) == record
    for partition in range(3):
        assert await redis.get(half.keys.marker(partition)) == half.store_epoch.encode()
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
    namespaces = Namespaces(redis)
    record = await open_shop(redis)
    layouts = [{"dim": n} for n in range(8)]
    answers = await asyncio.gather(*(namespaces.set_layout(record, layout) for layout in layouts))
    stored = await namespaces.load("shop")
    assert stored is not None
    assert stored.layout in layouts
    assert all(answer == stored for answer in answers)


async def test_layout_after_another_change(redis: Redis):
    namespaces = Namespaces(redis)
    record = await open_shop(redis)
    changed = await namespaces.replace_learner(record, {"b": 2})
    answer = await namespaces.set_layout(record, {"dim": 3})  # read before the change
    assert (answer.layout, answer.learner, answer.revision) == ({"dim": 3}, {"b": 2}, changed.revision + 1)


async def test_layout_is_reset_only_without_events(redis: Redis, make_event):
    namespaces = Namespaces(redis)
    record = await namespaces.set_layout(await open_shop(redis), {"dim": 3})
    record = await namespaces.set_layout(record, {"dim": 4})
    assert record.layout == {"dim": 4}
    stream = EventStream(redis, record.keys, dedupe_window_s=60, backlog_limit=10)
    await stream.enqueue([make_event("u", "e")])
    assert await namespaces.set_layout(record, {"dim": 4}) == record
    with pytest.raises(NamespaceConflict):
        await namespaces.set_layout(record, {"dim": 5})


async def test_replace_learner_compares(redis: Redis):
    namespaces = Namespaces(redis)
    record = await open_shop(redis)
    changed = await namespaces.replace_learner(record, {"b": 2})
    assert await namespaces.load("shop") == changed
    with pytest.raises(NamespaceConflict):
        await namespaces.replace_learner(record, {"c": 3})


async def test_changes_after_flushall(redis: Redis):
    namespaces = Namespaces(redis)
    record = await open_shop(redis)
    await redis.flushall()
    with pytest.raises(StoreReset):
        await namespaces.set_layout(record, {"dim": 3})
    again = await open_shop(redis)
    assert again.store_epoch != record.store_epoch
    with pytest.raises(StoreReset):
        await namespaces.replace_learner(record, {})


@pytest.mark.parametrize("blob", [b"", b"[]", b"null", b'{"name": "shop"}', b"\xff", b'{"name":3}', b"[" * 100_000])
async def test_corrupt_record(redis: Redis, blob: bytes):
    await redis.set(NamespaceKeys("shop", 1).record, blob)
    with pytest.raises(CorruptRecord):
        await Namespaces(redis).load("shop")


async def test_record_with_wrong_fields(redis: Redis):
    record = await open_shop(redis)
    for change in ({"state": "new"}, {"partitions": 0}, {"layout": 3}, {"seed": "x"}, {"name": "NO"}):
        blob = replace(record, **change).encode()
        with pytest.raises(CorruptRecord):
            NamespaceRecord.decode(blob)


async def test_names_are_known_from_creation_to_deletion(redis: Redis):
    namespaces = Namespaces(redis)
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
    namespaces = Namespaces(redis)
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
    await namespaces.delete(kept)  # once more does no harm


def test_what_goes_together_is_all_that_a_namespace_shares():
    keys = NamespaceKeys("shop", 1)
    names = [name for name, kind in vars(NamespaceKeys).items() if isinstance(kind, property)]
    meta = [getattr(keys, name) for name in names if isinstance(getattr(keys, name), str)]
    assert {key for key in meta if ":meta}:" in key} == {keys.record, *keys.shared}


async def test_who_deletes_late_deletes_nothing_of_a_namespace_that_has_begun_since(redis: Redis):
    namespaces = Namespaces(redis)
    first = await open_shop(redis, partitions=3)
    await namespaces.delete(first)
    tombstone = await namespaces.load("shop")
    assert tombstone is not None
    second = await open_shop(redis, partitions=2)
    await redis.set(second.keys.user("u"), "anything")
    await redis.hset(second.keys.arms, "a", "[1]")
    await redis.set(first.keys.user("v") if first.keys.partition_of("v") == 2 else "metaban:{shop:p02}:user:v", "old")
    before = {key async for key in redis.scan_iter("metaban:{shop:*")}
    await namespaces.delete(tombstone)  # by somebody who was held up for long
    after = {key async for key in redis.scan_iter("metaban:{shop:*")}
    assert before - after == {b"metaban:{shop:p02}:user:v"}  # of a partition that there is no more
    assert await namespaces.load("shop") == second
    assert await namespaces.names() == ["shop"]
    assert await namespaces.open(second) == second


async def test_a_namespace_that_is_gone_is_not_changed(redis: Redis):
    namespaces = Namespaces(redis)
    record = await open_shop(redis)
    assert await namespaces.reload(record) == record
    await namespaces.delete(record)
    with pytest.raises(StoreReset):
        await namespaces.reload(record)
    for change in (
        namespaces.set_layout(record, {"dim": 1}),
        namespaces.replace_learner(record, {"b": 1}),
        namespaces.set_reward_rules(record, RewardRules(wait_s=3)),
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
    namespaces = Namespaces(redis)
    first = await open_shop(redis)
    await namespaces.delete(first)
    records = await asyncio.gather(*(open_shop(redis, partitions=3, seed=n) for n in range(4)))
    assert len({record.store_epoch for record in records}) == 1
    assert records[0].store_epoch != first.store_epoch
    assert records[0].revision > first.revision
    assert await namespaces.names() == ["shop"]
    with pytest.raises(StoreReset):
        await namespaces.replace_learner(first, {"b": 1})


async def test_a_change_of_another_is_not_written_over(redis: Redis):
    namespaces = Namespaces(redis)
    record = await open_shop(redis)
    changed = await namespaces.change(record, overrides={"alpha": 1.0})
    assert changed is not None
    assert await namespaces.load("shop") == changed
    assert await namespaces.change(record, overrides={"alpha": 2.0}) is None
    assert await namespaces.load("shop") == changed


async def test_reward_rules_are_agreed_on(redis: Redis):
    namespaces = Namespaces(redis)
    record = await open_shop(redis)
    assert record.reward_rules == RewardRules()
    assert b"rewards" not in await redis.get(record.keys.record)
    assert await namespaces.set_reward_rules(record, RewardRules()) is record
    rules = RewardRules("last", -1, 1, 0, 60)
    changed = await namespaces.set_reward_rules(record, rules)
    assert (changed.reward_rules, changed.revision) == (rules, record.revision + 1)
    assert await namespaces.load("shop") == changed
    assert (await namespaces.set_reward_rules(changed, RewardRules())).reward_rules == RewardRules()


async def test_reward_rules_beside_other_changes(redis: Redis):
    namespaces = Namespaces(redis)
    record = await open_shop(redis)
    rules = [RewardRules(wait_s=n + 1) for n in range(4)]
    await asyncio.gather(
        namespaces.set_layout(record, {"dim": 1}), *(namespaces.set_reward_rules(record, each) for each in rules)
    )
    stored = await namespaces.load("shop")
    assert stored is not None
    assert stored.layout == {"dim": 1}
    assert stored.reward_rules in rules


@pytest.mark.parametrize("rewards", [[], 3, {"repeated": "never"}, {"other": 1}, {"reward_max": 0}])
async def test_rules_that_make_no_sense_are_damage(redis: Redis, rewards):
    record = await open_shop(redis)
    fields = {**json.loads(record.encode()), "rewards": rewards}
    with pytest.raises(CorruptRecord):
        NamespaceRecord.decode(json.dumps(fields).encode())
