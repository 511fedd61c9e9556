"""Events: stored once, never lost, delivered again, and buried at last."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from redis.asyncio import Redis

from store.errors import BacklogFull, CorruptRecord, FenceLost, StoreError, StoreReset
from store.events import EventStream, RewardEvent, create_groups
from store.keys import LEARNERS, NamespaceKeys
from store.reward_range import RewardRange


def test_event_round_trip(make_event):
    event = make_event("u", "e", reward=1 / 3)
    back = RewardEvent.decode(event.encode())
    assert back.features.tolist() == event.features.tolist()
    assert back.encode() == event.encode()
    assert back.reward == event.reward
    sample = back.sample()
    assert (sample.reward, sample.epoch, sample.received_ms) == (1 / 3, 4, 2_000)


def test_an_event_keeps_the_range_it_was_sent_in(make_event):
    event = make_event("u", "e", reward_range=RewardRange(-5, 1 / 3))
    back = RewardEvent.decode(event.encode())
    assert back.reward_range == back.sample().reward_range == RewardRange(-5, 1 / 3)
    before = {name: value for name, value in event.encode().items() if name != b"g"}
    assert RewardEvent.decode(before).reward_range is None
    assert make_event("u", "e").encode().keys() == event.encode().keys(), "a batch is stored with one number of fields"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"f", b"2"),
        (b"r", b"nan"),
        (b"p", b""),
        (b"x", b"12345"),
        (b"x", np.array([np.inf], dtype=np.float32).tobytes()),
        (b"u", b"\xff\xfe"),
        (b"m", b"1.5"),
        (b"m", b"9" * 30),
        (b"t0", None),
        (b"g", b"1 0"),
        (b"g", b"0"),
        (b"g", b"0 1 2"),
        (b"g", b"0 nan"),
        (b"g", b"a b"),
    ],
)
def test_malformed_event_is_refused(make_event, field, value):
    fields = make_event("u", "e").encode()
    if value is None:
        del fields[field]
    else:
        fields[field] = value
    with pytest.raises(CorruptRecord):
        RewardEvent.decode(fields)


async def test_enqueue_is_idempotent(redis: Redis, stream: EventStream, keys: NamespaceKeys, make_event):
    batch = [make_event(f"user {n}", f"e{n}") for n in range(10)]
    first = await stream.enqueue(batch)
    assert {answer.status for answer in first} == {"accepted"}
    assert [answer.partition for answer in first] == [keys.partition_of(e.user_id) for e in batch]
    again = await stream.enqueue([*batch, make_event("user 0", "e0", reward=1.0)])
    assert {answer.status for answer in again} == {"duplicate"}
    assert [answer.entry_id for answer in again] == [answer.entry_id for answer in [*first, first[0]]]
    assert await stream.backlog() == 10
    counts = [int(await redis.hget(keys.counters(p), "enqueued")) for p in range(2)]
    assert sum(counts) == 10


async def test_duplicate_within_a_batch(stream: EventStream, make_event):
    answers = await stream.enqueue([make_event("u", "e"), make_event("u", "other"), make_event("u", "e")])
    assert [answer.status for answer in answers] == ["accepted", "accepted", "duplicate"]
    assert answers[0].entry_id == answers[2].entry_id != answers[1].entry_id


async def test_racing_enqueues_store_one(stream: EventStream, make_event):
    answers = await asyncio.gather(*(stream.enqueue([make_event("u", "e")]) for _ in range(20)))
    assert sorted(answer.status for [answer] in answers) == ["accepted"] + ["duplicate"] * 19
    assert len({answer.entry_id for [answer] in answers}) == 1


async def test_dedupe_window_ends(redis: Redis, keys: NamespaceKeys, make_event):
    stream = EventStream(redis, keys, dedupe_window_s=0.02, backlog_limit=100)
    await stream.enqueue([make_event("u", "e")])
    await asyncio.sleep(0.05)
    assert [answer.status for answer in await stream.enqueue([make_event("u", "e")])] == ["accepted"]


async def test_enqueue_nothing(stream: EventStream):
    assert await stream.enqueue([]) == []


async def test_full_backlog_writes_nothing(redis: Redis, keys: NamespaceKeys, make_event, neighbours, picture):
    stream = EventStream(redis, keys, dedupe_window_s=60, backlog_limit=3)
    user = neighbours[0]
    kept = await stream.enqueue([make_event(user, "a"), make_event(user, "b")])
    before = await picture()
    with pytest.raises(BacklogFull) as refused:
        await stream.enqueue([make_event(user, "c"), make_event(user, "d")])
    assert refused.value.retry_after_s > 0
    assert await picture() == before
    # what is stored already takes no room, and neither does the same new event twice
    answers = await stream.enqueue([make_event(user, "a"), make_event(user, "c"), make_event(user, "c")])
    assert [answer.status for answer in answers] == ["duplicate", "accepted", "duplicate"]
    assert answers[0].entry_id == kept[0].entry_id
    assert [a.status for a in await stream.enqueue([make_event(user, "b")])] == ["duplicate"]


async def test_enqueue_after_flushall(redis: Redis, stream: EventStream, make_event):
    await redis.flushall()
    with pytest.raises(StoreReset):
        await stream.enqueue([make_event("u", "e")])
    assert await redis.dbsize() == 0


async def test_enqueue_survives_script_flush(redis: Redis, stream: EventStream, make_event):
    await stream.enqueue([make_event("u", "a")])
    await redis.script_flush()
    answers = await stream.enqueue([make_event(f"user {n}", f"e{n}") for n in range(6)])
    assert {answer.status for answer in answers} == {"accepted"}


async def test_wrong_type_writes_nothing(redis: Redis, stream: EventStream, keys, make_event, neighbours, picture):
    await redis.set(keys.counters(0), "no hash")
    before = await picture()
    with pytest.raises(StoreError):
        await stream.enqueue([make_event(neighbours[0], "e")])
    assert await picture() == before


async def test_read_delivers_each_entry_once(stream: EventStream, make_event, neighbours):
    answers = await stream.enqueue([make_event(user, f"of {user}") for user in neighbours])
    first = await stream.read(0, "one", count=2, block_ms=0)
    second = await stream.read(0, "two", count=9, block_ms=0)
    assert [d.entry_id for d in first + second] == [answer.entry_id for answer in answers]
    assert [d.event.user_id for d in first + second if d.event] == neighbours
    assert await stream.read(0, "one", count=9, block_ms=5) == []
    assert await stream.pending(0) == len(neighbours)
    assert await stream.backlog() == len(neighbours)


async def test_blocking_read_wakes_up(stream: EventStream, make_event, neighbours):
    waiting = asyncio.create_task(stream.read(0, "one", count=9, block_ms=2_000))
    await asyncio.sleep(0.02)
    await stream.enqueue([make_event(neighbours[0], "e")])
    assert [d.event.event_id for d in await waiting if d.event] == ["e"]


async def test_poison_is_delivered_without_event(redis: Redis, stream: EventStream, keys: NamespaceKeys):
    await redis.xadd(keys.events(0), {b"\xff": b"\x00"})
    [delivery] = await stream.read(0, "one", count=9, block_ms=0)
    assert delivery.event is None


async def test_stalled_entries_are_claimed(stream: EventStream, make_event, neighbours):
    await stream.enqueue([make_event(user, f"of {user}") for user in neighbours])
    lost = await stream.read(0, "dead", count=9, block_ms=0)
    assert await stream.claim_stalled(0, "alive", min_idle_ms=60_000, count=9) == []
    first = await stream.claim_stalled(0, "alive", min_idle_ms=0, count=2)
    assert [d.entry_id for d in first] == [d.entry_id for d in lost[:2]]
    again = await stream.claim_stalled(0, "third", min_idle_ms=0, count=9)
    assert [d.entry_id for d in again] == [d.entry_id for d in lost]
    assert [d.event.user_id for d in again if d.event] == neighbours


async def test_claim_looks_past_busy_entries(stream: EventStream, make_event, neighbours):
    user = neighbours[0]
    await stream.enqueue([make_event(user, f"e{n}") for n in range(30)])
    everything = await stream.read(0, "one", count=30, block_ms=0)
    await asyncio.sleep(0.5)
    # all but the last are young again, more of them than one step of the scan looks at
    busy = [delivery.entry_id for delivery in everything[:29]]
    await stream._redis.xclaim(stream._keys.events(0), LEARNERS, "busy", min_idle_time=0, message_ids=busy)
    [claimed] = await stream.claim_stalled(0, "two", min_idle_ms=400, count=1)
    assert claimed.entry_id == everything[29].entry_id


async def test_missing_group_is_healed(redis: Redis, stream: EventStream, keys, make_event, neighbours):
    await stream.enqueue([make_event(neighbours[0], "e")])
    await stream.read(0, "one", count=9, block_ms=0)
    await redis.xgroup_destroy(keys.events(0), LEARNERS)
    [delivery] = await stream.read(0, "two", count=9, block_ms=0)
    assert delivery.event is not None
    await redis.delete(keys.events(0))
    assert await stream.claim_stalled(0, "two", min_idle_ms=0, count=9) == []
    assert await stream.pending(0) == 0
    await create_groups(stream._redis, stream._keys, range(stream._keys.partitions))
    assert len(await redis.xinfo_groups(keys.events(0))) == 1


async def test_consumers_are_forgotten_once_nothing_waits_for_them(stream: EventStream, make_event):
    partition = stream._keys.partition_of("ann")
    await stream.enqueue([make_event("ann", "e1")])
    [delivery] = await stream.read(partition, "one", count=9, block_ms=0)
    await stream.read(partition, "two", count=9, block_ms=0)
    assert sorted(await stream.consumers(partition)) == ["one", "two"]
    await stream.release_from(partition, ["one", "two", "nobody"])
    assert await stream.consumers(partition) == ["one"]
    assert await stream.attempts(partition, [delivery.entry_id, "1-1"]) == [0, 0]
    await stream.count_attempt(delivery, "one")
    assert await stream.attempts(partition, [delivery.entry_id, "1-1"]) == [1, 0]
    assert await stream.attempts(partition, []) == []


async def test_a_lost_group_has_no_consumers(redis: Redis, keys, stream: EventStream):
    await redis.xgroup_destroy(keys.events(0), "learners")
    assert await stream.consumers(0) == []
    assert len(await redis.xinfo_groups(keys.events(0))) == 1


async def test_read_after_flushall(redis: Redis, stream: EventStream):
    await redis.flushall()
    with pytest.raises(StoreReset):
        await stream.consumers(0)
    with pytest.raises(StoreReset):
        await stream.read(0, "one", count=1, block_ms=0)
    assert await redis.dbsize() == 0


async def test_consumer_is_kept_while_it_owes(redis: Redis, stream: EventStream, keys, make_event, neighbours):
    await stream.enqueue([make_event(neighbours[0], "e")])
    [delivery] = await stream.read(0, "one", count=9, block_ms=0)
    assert not await stream.release_consumer("one")
    assert await stream.pending(0) == 1
    await stream.bury(delivery, "one", "tired")
    assert await stream.release_consumer("one")
    assert await redis.xinfo_consumers(keys.events(0), LEARNERS) == []


async def test_attempts_and_burial(redis: Redis, stream: EventStream, keys, make_event, neighbours):
    event = make_event(neighbours[0], "e")
    [answer] = await stream.enqueue([event])
    [delivery] = await stream.read(0, "one", count=9, block_ms=0)
    assert [await stream.count_attempt(delivery, "one") for _ in range(3)] == [1, 2, 3]
    assert await stream.count_attempt(delivery, "two") == 0  # it is not theirs
    assert await stream.attempts(0, [delivery.entry_id]) == [3]
    assert await stream.exists(0, answer.entry_id)
    await stream.bury(delivery, "one", "it never worked")
    assert not await stream.exists(0, answer.entry_id)
    assert await stream.backlog() == await stream.pending(0) == 0
    assert not await redis.exists(keys.attempts(0))
    [(_, fields)] = await redis.xrange(keys.dead_letters(0))
    assert fields[b"dead_reason"] == b"it never worked"
    assert fields[b"dead_entry"].decode() == answer.entry_id
    assert fields[b"dead_attempts"] == b"3"
    assert RewardEvent.decode(fields).encode() == event.encode()
    assert await redis.hget(keys.counters(0), "buried") == b"1"
    assert await stream.count_attempt(delivery, "one") == 0
    assert not await redis.exists(keys.attempts(0))
    # still known: the client who sends it again is not heard twice
    assert [a.status for a in await stream.enqueue([event])] == ["duplicate"]


async def test_burial_of_poison(redis: Redis, stream: EventStream, keys):
    await redis.xadd(keys.events(0), {f"field {n}": "x" for n in range(5_000)})
    [delivery] = await stream.read(0, "one", count=9, block_ms=0)
    await stream.bury(delivery, "one", "poison")
    [(_, fields)] = await redis.xrange(keys.dead_letters(0))
    assert fields[b"field 999"] == b"x"
    assert await stream.backlog() == 0


async def test_only_the_holder_buries(redis: Redis, stream: EventStream, make_event, neighbours, picture):
    await stream.enqueue([make_event(neighbours[0], "e")])
    [delivery] = await stream.read(0, "one", count=9, block_ms=0)
    await stream.claim_stalled(0, "two", min_idle_ms=0, count=9)
    before = await picture()
    with pytest.raises(FenceLost) as refused:
        await stream.bury(delivery, "one", "tired")
    assert refused.value.reason == "not-pending"
    assert await picture() == before
