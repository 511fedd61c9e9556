"""Users: a batch is applied completely or not at all."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.codec import Sample
from metaban.store.errors import CorruptRecord, FenceLost, StoreError
from metaban.store.events.event import Delivery
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceRecord
from metaban.store.shared.epochs import EpochStore
from metaban.store.users.records import UserState, UserUpdate
from metaban.store.users.users import REPLACED_KEPT_S, UserStore


def update_of(
    state: UserState, deliveries: list[Delivery], expected: tuple[int, int] = (0, 0), trail: str = ""
) -> UserUpdate:
    incarnation, version = expected
    samples = [delivery.event.sample() for delivery in deliveries if delivery.event]
    return UserUpdate(state, version, incarnation, samples, [delivery.entry_id for delivery in deliveries], trail)


@pytest.fixture
async def deliveries(stream: EventStream, make_event, neighbours) -> list[Delivery]:
    """Two events of the first neighbour, then one of the second, delivered to consumer `one`."""
    one, two = neighbours[:2]
    await stream.enqueue([make_event(one, "a"), make_event(one, "b", reward=0.7), make_event(two, "c")])
    return await stream.read([0], "one", count=9, block_ms=0)


def ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.entry_id for delivery in deliveries]


async def test_apply(redis: Redis, stream, users: UserStore, keys, deliveries, make_state, neighbours):
    one, two = neighbours[:2]
    await stream.count_attempt(deliveries[2], "one")
    updates = [
        update_of(make_state(one, 2, epoch=5), deliveries[:2]),
        update_of(make_state(two, 1), deliveries[2:]),
    ]
    assert await users.apply(0, "one", ids(deliveries), updates) == 3
    loaded = await users.load([one, two, "nobody"])
    assert set(loaded) == {one, two}
    assert (loaded[one].incarnation, loaded[one].version, loaded[one].epoch) == (0, 2, 5)
    assert np.array_equal(loaded[one].tensors["A"], np.eye(3) * 2)
    samples = await users.load_samples([one, two, "nobody"])
    assert [sample.reward for sample in samples[one]] == [0.1, 0.7]
    assert set(samples) == {one, two}
    assert await users.versions(0) == {one: (0, 2), two: (0, 1)}
    assert await users.applied() == {0: 3, 1: 0}
    log = await users.tail(0, "0-0", block_ms=0, count=10)
    assert [(line.user_id, line.incarnation, line.version, line.applied) for line in log] == [
        (one, 0, 2, 3),
        (two, 0, 1, 3),
    ]
    assert [list(line.entry_ids) for line in log] == [ids(deliveries[:2]), ids(deliveries[2:])]
    assert await users.log_head(0) == log[-1].cursor
    assert await stream.backlog() == await stream.pending(0) == 0
    assert not await redis.exists(keys.attempts(0))
    # the same apply again after a lost reply changes nothing
    with pytest.raises(FenceLost) as refused:
        await users.apply(0, "one", ids(deliveries), updates)
    assert refused.value.reason == "not-pending"


async def test_samples_are_trimmed(stream, users: UserStore, make_event, make_state, neighbours):
    user = neighbours[0]
    trail = ""
    for version in range(1, 6):
        await stream.enqueue([make_event(user, f"e{version}", reward=version / 10)])
        given = await stream.read([0], "one", count=9, block_ms=0)
        update = update_of(make_state(user, version), given, (0, version - 1), trail)
        assert await users.apply(0, "one", ids(given), [update]) == version
        trail = (await users.load([user]))[user].trail
        assert trail == update.trail
    samples = await users.load_samples([user])
    assert [sample.reward for sample in samples[user]] == [0.3, 0.4, 0.5]


async def test_an_equal_version_from_other_events_is_refused(
    stream, users: UserStore, deliveries, make_state, neighbours, picture
):
    """A store that lost its latest writes reuses versions; results computed before the loss are refused."""
    one = neighbours[0]
    first = update_of(make_state(one, 1), deliveries[:1])
    await users.apply(0, "one", ids(deliveries[:1]), [first])
    before = await picture()
    update = update_of(make_state(one, 2), deliveries[1:2], (0, 1), trail="another")
    with pytest.raises(FenceLost, match="version"):
        await users.apply(0, "one", ids(deliveries[1:2]), [update])
    assert await picture() == before
    assert await users.rebase(0, [replace(make_state(one, 1, epoch=1), trail="another")]) == [False]
    assert await users.rebase(0, [replace(make_state(one, 1, epoch=1), trail=first.trail)]) == [True]
    update = update_of(make_state(one, 2), deliveries[1:2], (0, 1), trail=first.trail)
    assert await users.apply(0, "one", ids(deliveries[1:2]), [update]) == 2


async def test_entries_without_update_are_acknowledged(stream, users: UserStore, deliveries, neighbours):
    assert await users.apply(0, "one", ids(deliveries), []) == 0
    assert await stream.backlog() == 0
    counters = await users.counters()
    assert (counters["applied"], counters["voided"]) == (0, 3)
    assert await users.load(neighbours) == {}


async def refused_without_writes(users, picture, reason, entry_ids, updates, consumer="one"):
    before = await picture()
    with pytest.raises(FenceLost) as refused:
        await users.apply(0, consumer, entry_ids, updates)
    assert refused.value.reason == reason
    assert await picture() == before


async def test_apply_refuses_an_unknown_entry(users, deliveries, make_state, neighbours, picture):
    update = update_of(make_state(neighbours[0], 2), deliveries[:2])
    entry_ids = [*ids(deliveries[:2]), "1-1"]
    await refused_without_writes(users, picture, "not-pending", entry_ids, [update])
    await refused_without_writes(users, picture, "not-pending", [*ids(deliveries[:2]), "junk"], [update])


async def test_apply_refuses_a_claimed_entry(redis, keys, users, deliveries, make_state, neighbours, picture):
    last = deliveries[1].entry_id
    await redis.xclaim(keys.events(0), "learners", "two", min_idle_time=0, message_ids=[last])
    update = update_of(make_state(neighbours[0], 2), deliveries[:2])
    await refused_without_writes(users, picture, "not-pending", ids(deliveries[:2]), [update])
    await refused_without_writes(users, picture, "not-pending", ids(deliveries[:2]), [update], "nobody")


async def test_apply_refuses_an_undelivered_entry(stream, users, make_event, make_state, neighbours, picture):
    user = neighbours[0]
    [answer] = await stream.enqueue([make_event(user, "e")])
    update = UserUpdate(make_state(user, 1), 0, 0, [], [answer.entry_id])
    await refused_without_writes(users, picture, "not-pending", [answer.entry_id], [update])


async def test_apply_refuses_without_group(redis, keys, users, deliveries, make_state, neighbours, picture):
    await redis.xgroup_destroy(keys.events(0), "learners")
    update = update_of(make_state(neighbours[0], 2), deliveries[:2])
    await refused_without_writes(users, picture, "not-pending", ids(deliveries[:2]), [update])


@pytest.mark.parametrize("expected", [(0, 1), (1, 0)])
async def test_apply_refuses_when_the_second_user_moved(users, deliveries, make_state, neighbours, picture, expected):
    one, two = neighbours[:2]
    updates = [
        update_of(make_state(one, 2), deliveries[:2]),
        update_of(make_state(two, 2, incarnation=expected[0]), deliveries[2:], expected),
    ]
    await refused_without_writes(users, picture, "version", ids(deliveries), updates)


@pytest.mark.parametrize("marker", ["another store", None])
async def test_apply_refuses_another_store(redis, keys, users, deliveries, make_state, neighbours, picture, marker):
    if marker is None:
        await redis.delete(keys.marker(0))
    else:
        await redis.set(keys.marker(0), marker)
    update = update_of(make_state(neighbours[0], 2), deliveries[:2])
    await refused_without_writes(users, picture, "store-id", ids(deliveries[:2]), [update])


@pytest.mark.parametrize("spoiled", ["user", "samples", "update_log", "attempts", "counters"])
async def test_apply_with_a_key_of_another_type(
    redis, keys: NamespaceKeys, users, deliveries, make_state, neighbours, picture, spoiled
):
    one, two = neighbours[:2]
    name = {"user": keys.user(two), "samples": keys.samples(two)}.get(spoiled) or getattr(keys, spoiled)(0)
    await redis.delete(name)
    await redis.set(name, "spoiled")
    before = await picture()
    updates = [
        update_of(make_state(one, 2), deliveries[:2]),
        update_of(make_state(two, 1), deliveries[2:]),
    ]
    with pytest.raises(StoreError):
        await users.apply(0, "one", ids(deliveries), updates)
    assert await picture() == before


async def test_invalid_batches_are_refused(users: UserStore, deliveries, make_state, neighbours, keys):
    one = neighbours[0]
    stranger = next(user for user in map(str, range(40)) if keys.partition_of(user) == 1)
    good = update_of(make_state(one, 2), deliveries[:2])
    for entry_ids, updates in [
        (ids(deliveries), [good, good]),
        (ids(deliveries[:2]) * 2, [good]),
        (ids(deliveries[:1]), [good]),
        (ids(deliveries), [update_of(make_state(stranger, 2), deliveries[:2])]),
        (ids(deliveries), [update_of(make_state(one, 0), deliveries[:2])]),
    ]:
        with pytest.raises(ValueError, match=r".+"):
            await users.apply(0, "one", entry_ids, updates)
    with pytest.raises(ValueError, match="partition"):
        await users.rebase(0, [make_state(stranger, 1)])


async def test_two_workers_one_wins(stream, users: UserStore, deliveries, make_state, neighbours):
    update = update_of(make_state(neighbours[0], 2), deliveries[:2])
    results = await asyncio.gather(
        *(users.apply(0, "one", ids(deliveries[:2]), [update]) for _ in range(8)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["FenceLost"] * 7 + ["int"]
    assert await users.applied() == {0: 2, 1: 0}


async def test_rebase(users: UserStore, deliveries, make_state, neighbours):
    one, two = neighbours[:2]
    updates = [update_of(make_state(one, 2), deliveries[:2]), update_of(make_state(two, 1), deliveries[2:])]
    await users.apply(0, "one", ids(deliveries), updates)
    head = await users.log_head(0)
    first = replace(make_state(one, 2, epoch=3), trail=updates[0].trail)
    states = [first, make_state(two, 7, epoch=3), make_state("user 999", 0, epoch=3)]
    states = [state for state in states if users.partition_of(state.user_id) == 0]
    assert (await users.rebase(0, states))[:2] == [True, False]
    assert [(u.epoch, u.version) for u in (await users.load([one, two])).values()] == [(3, 2), (0, 1)]
    [line] = await users.tail(0, head, block_ms=0, count=10)
    assert (line.user_id, line.version, line.entry_ids, line.applied) == (one, 2, (), 3)
    assert await users.rebase(0, [replace(first, epoch=2)]) == [False]  # an older epoch
    assert await users.rebase(0, []) == []


async def test_rebase_of_another_store(redis, keys, users: UserStore, make_state, neighbours, picture):
    await redis.set(keys.marker(0), "another store")
    before = await picture()
    with pytest.raises(FenceLost) as refused:
        await users.rebase(0, [make_state(neighbours[0], 1)])
    assert refused.value.reason == "store-id"
    assert await picture() == before


async def test_a_damaged_user_is_logged_without_id_and_does_not_affect_others(
    redis, keys, users: UserStore, make_state, caplog
):
    bob = make_state("bob", 1)
    good = {"incarnation": 0, "version": 1, "epoch": 0, "state": bob.encode()}
    await redis.hset(keys.user("ann"), mapping={**good, "state": b"junk"})
    await redis.hset(keys.user("bob"), mapping=good)
    await redis.rpush(keys.samples("ann"), b"junk")
    await redis.rpush(keys.samples("bob"), Sample(np.ones(2, np.float32), 1.0, 1.0, 0, 0, "a").encode())
    assert set(await users.load(["ann", "bob"])) == {"bob"}
    assert set(await users.load_samples(["ann", "bob"])) == {"bob"}
    assert caplog.text.count("user_record_damaged") == 2
    assert "'ann'" not in caplog.text
    # An update must not treat a damaged user as a new one.
    with pytest.raises(CorruptRecord, match="the state of a user"):
        await users.load_learners(["ann", "bob"])


async def test_positions_in_the_update_log(redis, stream, record, make_event, make_state, neighbours):
    users = UserStore(redis, record.keys, record.store_id, samples_kept=3, update_log_cap=1)
    user = neighbours[0]
    assert await users.log_head(0) == "0-0"
    assert not await users.logged(0, "5-0")
    heads, trail = [], ""
    for version in (1, 2):
        await stream.enqueue([make_event(user, f"e{version}")])
        given = await stream.read([0], "one", count=9, block_ms=0)
        update = update_of(make_state(user, version), given, (0, version - 1), trail)
        await users.apply(0, "one", ids(given), [update])
        trail = update.trail
        heads.append(await users.log_head(0))
    # trimming is approximate: nothing is removed yet
    assert [await users.logged(0, head) for head in heads] == [True, True]
    await redis.xtrim(record.keys.update_log(0), maxlen=1, approximate=False)
    assert [await users.logged(0, head) for head in heads] == [False, True]


async def test_versions_of_many_users(redis, keys, users: UserStore):
    await redis.hset(keys.versions(1), mapping={f"user {n}": f"1:{n}" for n in range(3_000)})
    found = await users.versions(1)
    assert len(found) == 3_000
    assert found["user 77"] == (1, 77)


async def test_tail_wakes_up(users: UserStore, deliveries, make_state, neighbours):
    waiting = asyncio.create_task(users.tail(0, "0-0", block_ms=2_000, count=10))
    await asyncio.sleep(0.02)
    update = update_of(make_state(neighbours[0], 2), deliveries[:2])
    await users.apply(0, "one", ids(deliveries[:2]), [update])
    assert [line.user_id for line in await waiting] == [neighbours[0]]


async def test_the_later_of_two_refits_wins(users: UserStore, deliveries, make_state, neighbours):
    one, two = neighbours[:2]
    updates = [update_of(make_state(one, 2), deliveries[:2]), update_of(make_state(two, 1), deliveries[2:])]
    await users.apply(0, "one", ids(deliveries), updates)
    states = await users.load([one, two])
    assert await users.rebase(0, [replace(states[one], epoch=1)], refit=7) == [True]
    assert await users.rebase(0, [replace(states[two], epoch=1)], refit=7) == [True]
    with pytest.raises(FenceLost, match="overtaken"):
        await users.rebase(0, [replace(states[two], epoch=2)], refit=6)
    assert (await users.load([two]))[two].epoch == 1
    assert await users.rebase(0, [replace(states[two], epoch=2)]) == [True]  # under the current epoch


async def test_states_that_a_refit_replaces_are_kept_until_a_while_after_it(
    redis: Redis, keys: NamespaceKeys, users: UserStore, deliveries, make_state, neighbours
):
    one, two = neighbours[:2]
    updates = [update_of(make_state(one, 2), deliveries[:2]), update_of(make_state(two, 1), deliveries[2:])]
    await users.apply(0, "one", ids(deliveries), updates)
    before = await users.load([one, two])
    assert await users.rebase(0, [replace(before[one], epoch=1, tensors={"A": np.zeros(1)})], refit=1) == [True]
    again = replace(before[one], epoch=1, tensors={"A": np.ones(1)})
    assert await users.rebase(0, [again], refit=2) == [True]  # the first trainer died
    moved = await users.load([one, two])
    replaced = await users.load_replaced(moved.values())
    assert set(replaced) == {one}
    assert (replaced[one].incarnation, replaced[one].version, replaced[one].epoch) == (0, 2, 0)
    for name, array in before[one].tensors.items():
        np.testing.assert_array_equal(replaced[one].tensors[name], array)
    assert await redis.ttl(keys.replaced(0)) == -1
    await users.release_replaced()
    assert 0 < await redis.ttl(keys.replaced(0)) <= REPLACED_KEPT_S
    assert await users.rebase(0, [replace(moved[two], epoch=2)], refit=3) == [True]
    assert await redis.ttl(keys.replaced(0)) == -1, "another refit has begun"
    assert await users.rebase(0, [replace(moved[one], epoch=2)]) == [True]
    assert (await users.load_replaced(moved.values()))[one].epoch == 0, "a published epoch replaces nothing"


async def test_only_a_replaced_state_that_is_as_new_is_loaded(
    redis: Redis, keys: NamespaceKeys, users: UserStore, deliveries, make_state, neighbours
):
    user = neighbours[0]
    await users.apply(0, "one", ids(deliveries[:2]), [update_of(make_state(user, 2), deliveries[:2])])
    state = (await users.load([user]))[user]
    await users.rebase(0, [replace(state, epoch=1)], refit=1)
    found = [
        set(await users.load_replaced([replace(state, incarnation=incarnation, version=version)]))
        for incarnation, version in ((0, 1), (0, 2), (0, 3), (1, 2))
    ]
    assert found == [{user}, {user}, set(), set()]
    await redis.hset(keys.replaced(0), user, b"damaged")
    assert await users.load_replaced([state]) == {}


async def test_a_refit_needs_the_lease(redis: Redis, record: NamespaceRecord):
    epochs = EpochStore(redis, record.keys, record.store_id)
    assert await epochs.begin_refit("me") is None
    await epochs.acquire_lease("me", 60_000)
    assert [await epochs.begin_refit("me") for _ in range(2)] == [1, 2]
    assert await epochs.begin_refit("another") is None
