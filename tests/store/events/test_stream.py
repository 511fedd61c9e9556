"""Events: stored once, never lost, delivered again, and turned into dead letters after too many attempts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.errors import BacklogFull, CorruptRecord, FenceLost, StoreError, StoreReset
from metaban.store.events.event import RewardEvent, default_event_id, plain_event_id
from metaban.store.events.stream import ARM_REWARDS_MAX, EventStream, PartitionStatus, create_groups
from metaban.store.keys import LEARNERS, NamespaceKeys
from metaban.store.namespaces import NamespaceStore
from metaban.store.reward_rules import RewardRange
from metaban.store.shared.partition_leases import PartitionLeases
from metaban.store.users.users import COUNTERS
from tests.store.helpers import make_decision
from tests.worker.workshop import make_event


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
    assert make_event("u", "e").encode().keys() == event.encode().keys(), (
        "all entries of a batch have the same number of fields"
    )


def test_an_event_keeps_the_place_of_its_arm():
    decision = make_decision()
    for place in range(2):
        event = RewardEvent.of(decision, place, 1, RewardRange(0, 1), event_id="e", received_ms=5)
        assert (event.arm_id, event.place) == (decision.items[place].arm_id, place)
        back = RewardEvent.decode(event.encode())
        assert back.place == back.sample().place == place
    before = {name: value for name, value in event.encode().items() if name != b"k"}
    assert RewardEvent.decode(before).place == 0


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
        (b"k", b""),
        (b"k", b"-1"),
        (b"k", b"1.5"),
        (b"k", b"100"),
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


async def test_rewards_of_an_arm_of_a_decision_are_limited(
    redis: Redis, keys: NamespaceKeys, make_event, neighbours, picture
):
    stream, user = EventStream(redis, keys, dedupe_window_s=60, backlog_limit=10_000), neighbours[0]

    def reward(event_id: str, decision_id: str = "d", arm_id: str = "a", **changes) -> RewardEvent:
        return make_event(user, event_id, decision_id=decision_id, arm_id=arm_id, **changes)

    await stream.enqueue([reward(f"e{number}") for number in range(ARM_REWARDS_MAX - 1)])
    answers = await stream.enqueue(
        [
            reward("last"),
            reward("last"),
            reward("more"),
            reward("more"),
            reward("e0"),
            reward("of another arm", arm_id="b"),
            reward("of another decision", decision_id="e"),
            reward(plain_event_id("d", "a")),
            reward(default_event_id("d", "a"), by_default=True),
        ]
    )
    assert [answer.status for answer in answers] == [
        "accepted", "duplicate", "too-many", "too-many", "duplicate", "accepted", "accepted", "accepted", "accepted",
    ]  # fmt: skip
    assert answers[2].entry_id == ""
    assert await stream.backlog() == ARM_REWARDS_MAX + 4
    before = await picture()
    assert [answer.status for answer in await stream.enqueue([reward("more")])] == ["too-many"]
    assert await picture() == before
    counted = keys.rewarded(user, plain_event_id("d", "a"))
    assert int(await redis.get(counted)) == ARM_REWARDS_MAX
    assert await redis.pttl(counted) > 0


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
    # stored events take no room, and neither does the same new event twice
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
    first = await stream.read([0], "one", count=2, block_ms=0)
    second = await stream.read([0], "two", count=9, block_ms=0)
    assert [d.entry_id for d in first + second] == [answer.entry_id for answer in answers]
    assert [d.event.user_id for d in first + second if d.event] == neighbours
    assert await stream.read([0], "one", count=9, block_ms=5) == []
    assert await stream.pending(0) == len(neighbours)
    assert await stream.backlog() == len(neighbours)


async def test_blocking_read_wakes_up(stream: EventStream, make_event, neighbours):
    waiting = asyncio.create_task(stream.read([0], "one", count=9, block_ms=2_000))
    await asyncio.sleep(0.02)
    await stream.enqueue([make_event(neighbours[0], "e")])
    assert [d.event.event_id for d in await waiting if d.event] == ["e"]


async def test_an_invalid_entry_is_delivered_without_event(redis: Redis, stream: EventStream, keys: NamespaceKeys):
    await redis.xadd(keys.events(0), {b"\xff": b"\x00"})
    [delivery] = await stream.read([0], "one", count=9, block_ms=0)
    assert delivery.event is None


async def test_stalled_entries_are_claimed(stream: EventStream, make_event, neighbours):
    await stream.enqueue([make_event(user, f"of {user}") for user in neighbours])
    lost = await stream.read([0], "dead", count=9, block_ms=0)
    assert await stream.claim_stalled([0], "alive", min_idle_ms=60_000, count=9) == []
    first = await stream.claim_stalled([0], "alive", min_idle_ms=0, count=2)
    assert [d.entry_id for d in first] == [d.entry_id for d in lost[:2]]
    again = await stream.claim_stalled([0], "third", min_idle_ms=0, count=9)
    assert [d.entry_id for d in again] == [d.entry_id for d in lost]
    assert [d.event.user_id for d in again if d.event] == neighbours


async def test_claim_looks_past_busy_entries(redis: Redis, stream: EventStream, keys, make_event, neighbours):
    user = neighbours[0]
    await stream.enqueue([make_event(user, f"e{n}") for n in range(30)])
    everything = await stream.read([0], "one", count=30, block_ms=0)
    await asyncio.sleep(0.5)
    # all but the last were delivered again just now; they are more than one step of the scan reads
    busy = [delivery.entry_id for delivery in everything[:29]]
    await redis.xclaim(keys.events(0), LEARNERS, "busy", min_idle_time=0, message_ids=busy)
    [claimed] = await stream.claim_stalled([0], "two", min_idle_ms=400, count=1)
    assert claimed.entry_id == everything[29].entry_id


async def test_missing_group_is_created_again(redis: Redis, stream: EventStream, keys, make_event, neighbours):
    await stream.enqueue([make_event(neighbours[0], "e")])
    await stream.read([0], "one", count=9, block_ms=0)
    await redis.xgroup_destroy(keys.events(0), LEARNERS)
    [delivery] = await stream.read([0], "two", count=9, block_ms=0)
    assert delivery.event is not None
    await redis.delete(keys.events(0))
    assert await stream.claim_stalled([0], "two", min_idle_ms=0, count=9) == []
    assert await stream.pending(0) == 0
    await create_groups(redis, keys, range(keys.partitions))
    assert len(await redis.xinfo_groups(keys.events(0))) == 1


async def test_consumers_are_deleted_when_they_have_nothing_pending(stream: EventStream, keys, make_event):
    partition = keys.partition_of("ann")
    await stream.enqueue([make_event("ann", "e1")])
    [delivery] = await stream.read([partition], "one", count=9, block_ms=0)
    await stream.read([partition], "two", count=9, block_ms=0)
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
        await stream.read([0], "one", count=1, block_ms=0)
    assert await redis.dbsize() == 0


async def test_a_consumer_with_pending_entries_is_kept(redis: Redis, stream: EventStream, keys, make_event, neighbours):
    await stream.enqueue([make_event(neighbours[0], "e")])
    [delivery] = await stream.read([0], "one", count=9, block_ms=0)
    assert not await stream.release_consumer("one")
    assert await stream.pending(0) == 1
    await stream.letters.bury(delivery, "one", "tired")
    assert await stream.release_consumer("one")
    assert await redis.xinfo_consumers(keys.events(0), LEARNERS) == []


async def test_attempts_are_counted_up_to_the_dead_letter(
    redis: Redis, stream: EventStream, keys, make_event, neighbours
):
    event = make_event(neighbours[0], "e")
    [answer] = await stream.enqueue([event])
    [delivery] = await stream.read([0], "one", count=9, block_ms=0)
    assert [await stream.count_attempt(delivery, "one") for _ in range(3)] == [1, 2, 3]
    assert await stream.count_attempt(delivery, "two") == 0  # it belongs to another consumer
    assert await stream.attempts(0, [delivery.entry_id]) == [3]
    assert await stream.exists(0, answer.entry_id)
    await stream.letters.bury(delivery, "one", "it never worked")
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
    # still known: a client that sends it again gets `duplicate`
    assert [a.status for a in await stream.enqueue([event])] == ["duplicate"]


async def test_invalid_entries_become_dead_letters(redis: Redis, stream: EventStream, keys):
    await redis.xadd(keys.events(0), {f"field {n}": "x" for n in range(5_000)})
    [delivery] = await stream.read([0], "one", count=9, block_ms=0)
    await stream.letters.bury(delivery, "one", "poison")
    [(_, fields)] = await redis.xrange(keys.dead_letters(0))
    assert fields[b"field 999"] == b"x"
    assert await stream.backlog() == 0


async def test_only_the_holder_makes_a_dead_letter(redis: Redis, stream: EventStream, make_event, neighbours, picture):
    await stream.enqueue([make_event(neighbours[0], "e")])
    [delivery] = await stream.read([0], "one", count=9, block_ms=0)
    await stream.claim_stalled([0], "two", min_idle_ms=0, count=9)
    before = await picture()
    with pytest.raises(FenceLost) as refused:
        await stream.letters.bury(delivery, "one", "tired")
    assert refused.value.reason == "not-pending"
    assert await picture() == before


# ---------------------------------------------------------------------- status


NOTHING = dict.fromkeys(COUNTERS, 0)


@pytest.fixture
async def keys(client: Redis) -> NamespaceKeys:
    return (await NamespaceStore(client).open_or_create("shop", partitions=2, seed=0, learner={})).keys


@pytest.fixture
def stream(client: Redis, keys: NamespaceKeys) -> EventStream:
    return EventStream(client, keys, dedupe_window_s=60, backlog_limit=100)


def user_of(keys: NamespaceKeys, partition: int) -> str:
    return next(name for name in map(str, range(99)) if keys.partition_of(name) == partition)


async def test_before_the_first_event(stream: EventStream) -> None:
    assert await stream.status(COUNTERS) == [
        PartitionStatus(partition, 0, 0, 0, None, None, 0, NOTHING) for partition in range(2)
    ]


async def test_partition_by_partition(client: Redis, keys: NamespaceKeys, stream: EventStream) -> None:
    one, other = user_of(keys, 0), user_of(keys, 1)
    await stream.enqueue([make_event(one, number) for number in range(5)] + [make_event(other, 9)])
    for token in ("worker 6", "worker 7"):
        await PartitionLeases(client, keys, token, ttl_ms=10_000).renew()
    await PartitionLeases(client, keys, "worker 6", ttl_ms=10_000).renew()  # leaves the others their share
    await PartitionLeases(client, keys, "worker 7", ttl_ms=10_000).renew()
    await PartitionLeases(client, keys, "worker 6", ttl_ms=10_000).leave()
    delivered = await stream.read([0], "reader", count=3, block_ms=0)
    await stream.letters.bury(delivered[0], "reader", "test")
    first, second = await stream.status(COUNTERS)
    assert (first.waiting, first.pending, first.consumers, first.owner, first.dead_letters) == (4, 2, 1, None, 1)
    assert first.counters == {**NOTHING, "enqueued": 5, "buried": 1}
    assert (second.waiting, second.pending, second.consumers, second.owner) == (1, 0, 0, "worker 7")
    assert second.counters == {**NOTHING, "enqueued": 1}
    for status in (first, second):
        assert status.oldest_age_ms is not None
        assert 0 <= status.oldest_age_ms < 60_000
        counted = status.counters
        done = counted["applied"] + counted["voided"] + counted["buried"]
        assert counted["enqueued"] + counted["replayed"] == done + status.waiting


async def test_ages_are_those_of_the_oldest_waiting_event(
    client: Redis, keys: NamespaceKeys, stream: EventStream
) -> None:
    await stream.enqueue([make_event(user_of(keys, 0), 1)])
    await client.xadd(keys.events(1), {"old": "1"}, id="1000-0")
    await client.xadd(keys.events(1), {"newer": "1"})
    await client.xadd(keys.dead_letters(1), {"any": "1"}, id=f"{2**64 - 1}-1")
    ages = [status.oldest_age_ms for status in await stream.status(COUNTERS)]
    assert ages[0] is not None
    assert ages[0] < 60_000
    assert ages[1] is not None
    assert ages[1] > 40 * 365 * 86_400 * 1_000
    await client.delete(keys.events(1))
    await client.xadd(keys.events(1), {"to come": "1"}, id=f"{2**64 - 1}-1")
    ahead = (await stream.status(COUNTERS))[1]
    assert (ahead.oldest_age_ms, ahead.waiting, ahead.pending, ahead.consumers) == (0, 1, 0, 0)


async def test_with_a_destroyed_group(client: Redis, keys: NamespaceKeys, stream: EventStream) -> None:
    await stream.enqueue([make_event(user_of(keys, 0), 1)])
    await client.execute_command("XGROUP", "DESTROY", keys.events(0), "learners")
    await client.delete(keys.events(1))
    first, second = await stream.status(COUNTERS)
    assert (first.waiting, first.pending, first.consumers) == (1, 0, 0)
    assert (second.waiting, second.pending, second.consumers) == (0, 0, 0)
