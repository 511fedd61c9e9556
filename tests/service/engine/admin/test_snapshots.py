"""Snapshots are consistent, and a restore writes exactly their content."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from metaban.models.settings import named_settings
from metaban.store.errors import FenceLost, SnapshotError
from metaban.store.namespaces import NamespaceStore
from metaban.store.snapshots.restore_intent import RestoreStore
from metaban.store.users.records import UserUpdate
from tests.service.snapshots import (
    event_of_now,
    in_place,
    in_small_parts,
    kept,
    kept_epoch,
    learn,
    learned,
    put_back,
    stored,
    take,
    tallied,
)
from tests.worker.workshop import NAME, OpenWorkshop, Workshop, make_event


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_parts(monkeypatch)


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    shop = await open_workshop(partitions=3)
    await in_place(shop)
    return shop


async def test_snapshot_equals_the_store(shop: Workshop, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    manifest = await take(shop, tmp_path, name="first", progress=lambda *told: seen.append(told))
    assert kept(tmp_path, manifest) == await stored(shop)
    assert manifest.users == 12
    assert manifest.applied == tuple((await shop.users.applied()).values())
    assert manifest.cursors == tuple([await shop.users.log_head(partition) for partition in range(3)])
    current = await shop.epochs.current()
    assert current is not None
    found = kept_epoch(tmp_path, manifest)
    assert (found.number, found.events, found.refitted) == (current.number, current.events, current.refitted)
    assert {name: array.tobytes() for name, array in found.tensors.items()} == {
        name: array.tobytes() for name, array in current.tensors.items()
    }
    assert manifest.epoch == current.number > 0
    assert seen[-1] == ("users", 12, 12)
    assert (manifest.name, manifest.namespace, manifest.damaged) == ("first", NAME, 0)
    assert not await shop.redis.exists(shop.keys.lease)


async def test_snapshot_under_traffic_is_consistent(shop: Workshop, tmp_path: Path) -> None:
    done = asyncio.Event()
    applied = 0

    async def traffic() -> None:
        nonlocal applied
        number = 1_000
        while not done.is_set():
            number += 1
            await learn(shop, {f"user {number % 17}": 1, f"guest {number % 40}": 1}, first=2 * number)
            applied += 2

    running = asyncio.create_task(traffic())
    during = 0
    try:
        for _ in range(5):
            before = applied
            manifest = await take(shop, tmp_path)
            records = kept(tmp_path, manifest)
            assert sum(record.version for record in records.values()) == manifest.events
            during += applied - before
            # The logs up to the snapshot's cursors name exactly its versions.
            standing = {}
            for partition, cursor in enumerate(manifest.cursors):
                lines = await shop.redis.xrange(shop.keys.update_log(partition), "-", cursor)
                standing |= {line[b"u"].decode(): (int(line[b"i"]), int(line[b"v"])) for _, line in lines}
                assert lines[-1][0] == cursor.encode()
                assert int(lines[-1][1][b"t"]) == manifest.applied[partition]
            assert standing == {user: (record.incarnation, record.version) for user, record in records.items()}
            for record in records.values():
                assert len(record.samples) == min(record.version, shop.samples_kept)
    finally:
        done.set()
        await running
    assert during > 0


async def test_partition_that_keeps_changing_is_refused(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metaban.store.snapshots.create.MAX_PASSES", 0)
    with pytest.raises(SnapshotError, match="try again later"):
        await take(shop, tmp_path)
    assert os.listdir(tmp_path) == []


async def test_damaged_user_is_left_out(shop: Workshop, tmp_path: Path) -> None:
    await shop.redis.hset(shop.keys.user("user 3"), "state", b"broken")
    manifest = await take(shop, tmp_path)
    assert (manifest.users, manifest.damaged) == (11, 1)
    assert "user 3" not in kept(tmp_path, manifest)
    await put_back(shop.redis, tmp_path, manifest)


async def test_restore(shop: Workshop, tmp_path: Path) -> None:
    before = await stored(shop)
    manifest = await take(shop, tmp_path)
    epoch = await shop.epochs.current()
    assert epoch is not None
    await learn(shop, {"user 1": 3, "user 2": 1, "late": 2}, first=500)
    meta = shop.epoch_trainer()
    await meta.tick()
    moved = await stored(shop)
    total = sum((await shop.users.applied()).values())
    before_restore = await shop.epochs.current()
    assert before_restore is not None

    done = await put_back(shop.redis, tmp_path, manifest)
    after = await stored(shop)
    assert learned(after) == learned(before)
    current = await shop.epochs.current()
    assert current is not None
    assert (done.users, done.dropped, done.forgotten, done.epoch) == (12, 1, 0, current.number)
    assert current.number > epoch.number
    assert current.refitted == current.number
    assert {record.epoch for record in after.values()} == {current.number}
    # Published as any epoch, but derived from none that a worker knows.
    assert current.stamp not in ("", epoch.stamp, before_restore.stamp)
    assert current.follows == ""
    for name, tensor in {**epoch.tensors, "epoch": np.float64(current.number)}.items():
        np.testing.assert_array_equal(current.tensors[name], tensor, err_msg=name)
    # Earlier results for the user are void.
    assert all(record.incarnation > moved[user].incarnation for user, record in after.items())
    assert await shop.redis.hgetall(shop.keys.user("late")) == {
        b"incarnation": b"1",
        b"version": b"0",
    }
    assert not await shop.redis.exists(shop.keys.samples("late"))
    assert await RestoreStore(shop.redis, shop.keys, shop.record.store_id).unfinished() is None
    # The count of applied events is kept, and so is the distance to the next epoch.
    assert sum((await shop.users.applied()).values()) == total
    assert total - current.events == manifest.events - epoch.events
    assert await tallied(shop)


async def test_results_from_before_a_restore_are_refused(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    partition = shop.keys.partition_of("user 1")
    [delivery] = await shop.give([make_event("user 1", 900)], partition=partition)
    assert delivery.event is not None
    state = (await shop.users.load(["user 1"]))["user 1"]
    late = replace(state, version=state.version + 1)
    update = UserUpdate(late, state.version, state.incarnation, [delivery.event.sample()], [delivery.entry_id])
    rebased = replace(state, epoch=state.epoch + 1)

    await put_back(shop.redis, tmp_path, manifest)
    restored = await stored(shop)
    with pytest.raises(FenceLost, match="version"):
        await shop.users.apply(partition, "c1", [delivery.entry_id], [update])
    assert await shop.users.rebase(partition, [rebased]) == [False]
    assert await stored(shop) == restored


async def test_events_during_a_restore_count_at_most_once(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    versions = {user: record.version for user, record in kept(tmp_path, manifest).items()}
    await learn(shop, {f"user {n}": 7 for n in range(12)}, first=100)
    heads = [await shop.users.log_head(partition) for partition in range(3)]
    done = asyncio.Event()
    model = shop.new_model()
    await model.refresh_epoch()

    async def traffic(partition: int) -> None:
        worker, number = f"w{partition}", 10_000 * (1 + partition)
        mine = [user for user in versions if shop.keys.partition_of(user) == partition]
        while not done.is_set():
            number += 1
            await shop.streams.enqueue([await event_of_now(shop, mine[number % len(mine)], number)])
            deliveries = await shop.streams.read([partition], worker, count=8, block_ms=1)
            if deliveries:
                await shop.publisher(worker, model=model).publish(partition, deliveries)

    running = [asyncio.create_task(traffic(partition)) for partition in range(3)]
    for _ in range(3):
        restored = await put_back(shop.redis, tmp_path, manifest)
    done.set()
    await asyncio.gather(*running)
    # The log since the last restore of each user contains every version.
    expected = {}
    for partition, head in enumerate(heads):
        for _, line in await shop.redis.xrange(shop.keys.update_log(partition), f"({head}"):
            user, standing = line[b"u"].decode(), (int(line[b"i"]), int(line[b"v"]))
            if standing == (3, versions[user]) and not line[b"e"] and expected.get(user, (0, 0))[0] < 3:
                expected[user] = standing
            elif line[b"e"] and user in expected:
                expected[user] = (3, expected[user][1] + len(line[b"e"].split(b",")))
                assert standing == expected[user]
    after = await stored(shop)
    assert expected == {user: (record.incarnation, record.version) for user, record in after.items()}
    assert any(version > versions[user] for user, (_, version) in expected.items())
    assert await tallied(shop)
    # Users fitted under the previous epoch are fitted again.
    await shop.epoch_trainer().tick()
    labels = await shop.users.fitted_under(versions)
    assert {user: epoch for user, epoch in labels.items() if epoch < restored.epoch} == {}


async def test_worker_continues_after_a_restore(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    behind = shop.new_model()
    await behind.refresh_epoch()
    done = await put_back(shop.redis, tmp_path, manifest)
    assert behind.epoch.number < done.epoch
    partition = shop.keys.partition_of("user 1")
    deliveries = await shop.give([await event_of_now(shop, "user 1", 77)], partition=partition)
    await shop.publisher(model=behind).publish(partition, deliveries)
    assert await shop.users.fitted_under(["user 1"]) == {"user 1": done.epoch}


async def test_learning_continues_after_a_restore(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    await learn(shop, {"user 1": 40}, first=2_000)
    meta = shop.epoch_trainer()
    await meta.tick()
    await put_back(shop.redis, tmp_path, manifest)
    number = await shop.epoch_number()
    assert number is not None
    # Events more than doubled, from 30 to 70, yet the restored epoch is not replaced at once.
    await meta.tick()
    assert await shop.epoch_number() == number
    # The next epoch is due at 128 events.
    await learn(shop, {f"user {n}": 5 for n in range(12)}, first=3_000)
    await meta.tick()
    assert await shop.epoch_number() == number + 1
    versions = await shop.versions()
    assert versions == {f"user {n}": 1 + n % 4 + 5 for n in range(12)}


async def test_restored_store_learns_as_the_original(
    open_workshop: OpenWorkshop,
    tmp_path: Path,
) -> None:
    """Disaster recovery: into an empty store, and then the same events give the same learners and epochs."""
    shop = await open_workshop(partitions=2, settings=named_settings("default", epoch_events=8), samples_kept=30)
    noted = shop.model.trainer.learner.noted  # type: ignore[union-attr]

    async def go_on(where: Workshop, first: int, last: int) -> None:
        for number in range(first, last):
            epoch = await where.epoch_number() or 0
            phi = np.resize(generator_of(number), noted).astype(np.float32)
            event = await event_of_now(where, f"user {number % 5}", number, phi=phi, epoch=epoch)
            await where.streams.enqueue([event])
            for partition in range(2):
                await where.model.refresh_epoch()
                await where.publisher().publish(
                    partition, await where.streams.read([partition], "c1", count=9, block_ms=1)
                )
            await meta_of[id(where)].tick()

    def generator_of(number: int) -> np.ndarray:
        return np.random.default_rng(number).normal(size=7) * 0.1

    meta_of = {id(shop): shop.epoch_trainer()}
    await shop.epoch_trainer().tick()
    await go_on(shop, 0, 45)
    manifest = await take(shop, tmp_path)
    at_snapshot = await stored(shop)
    await go_on(shop, 45, 80)
    expected, epoch = await stored(shop), await shop.epochs.current()

    await shop.redis.flushall()
    await put_back(shop.redis, tmp_path, manifest)
    record = await NamespaceStore(shop.redis).load(NAME)
    assert record is not None
    assert record.store_id != shop.record.store_id
    assert (record.seed, record.learner, record.layout) == (0, shop.record.learner, shop.record.layout)
    again = Workshop(shop.redis, record, shop.compute, samples_kept=30)
    assert learned(await stored(again)) == learned(at_snapshot)
    assert (await again.epoch_number()) == manifest.epoch
    assert sum((await again.users.applied()).values()) == 45
    meta_of[id(again)] = again.epoch_trainer()
    await go_on(again, 45, 80)
    found, current = await stored(again), await again.epochs.current()
    assert epoch is not None
    assert current is not None
    assert current.number == epoch.number > manifest.epoch
    assert current.events == epoch.events
    for name, tensor in {**epoch.tensors, "epoch": np.float64(current.number)}.items():
        np.testing.assert_array_equal(current.tensors[name], tensor, err_msg=name)
    assert learned(found) == learned(expected)
    assert await tallied(again)


async def test_restored_epoch_has_the_new_number(
    open_workshop: OpenWorkshop,
    tmp_path: Path,
) -> None:
    shop = await open_workshop(settings=named_settings("default"))
    meta = shop.epoch_trainer()
    await meta.tick()
    manifest = await take(shop, tmp_path)
    assert kept_epoch(tmp_path, manifest).tensors["epoch"] == manifest.epoch == 0
    for _ in range(3):
        done = await put_back(shop.redis, tmp_path, manifest)
    current = await shop.epochs.current()
    assert current is not None
    assert current.tensors["epoch"] == done.epoch == current.number == 3


async def test_user_of_an_older_epoch_is_fitted_again(shop: Workshop, tmp_path: Path) -> None:
    """A user whose state is of an older epoch in the snapshot is fitted again after the restore."""
    await shop.redis.hset(shop.keys.user("user 5"), "epoch", 0)  # missed by the last refit
    await shop.redis.hset(shop.keys.user("user 6"), "epoch", 99)  # refitted by a trainer that died before it published
    manifest = await take(shop, tmp_path)
    sound = {user: state for user, state in (await stored(shop)).items() if user not in ("user 5", "user 6")}
    done = await put_back(shop.redis, tmp_path, manifest)
    labels = await shop.users.fitted_under(await shop.versions())
    assert {user for user, epoch in labels.items() if epoch < done.epoch} == {"user 5", "user 6"}
    await shop.epoch_trainer().tick()
    labels = await shop.users.fitted_under(await shop.versions())
    assert set(labels.values()) == {done.epoch}
    after = await stored(shop)
    assert learned({user: after[user] for user in sound}) == learned(sound)


@pytest.mark.parametrize("back", [False, True], ids=["away", "come back"])
async def test_forgotten_user_is_not_restored(shop: Workshop, tmp_path: Path, back: bool) -> None:
    manifest = await take(shop, tmp_path)
    await shop.users.forget("user 4")
    if back:
        await learn(shop, {"user 4": 2}, first=800)
    done = await put_back(shop.redis, tmp_path, manifest)
    assert (done.users, done.forgotten) == (11, 1)
    assert (await shop.users.load(["user 4"]))["user 4"].forgotten
    assert await shop.users.load_samples(["user 4"]) == {}
    # A snapshot taken after the forget has the new incarnation, and restores it.
    await learn(shop, {"user 4": 3}, first=850)
    later = await take(shop, tmp_path)
    await learn(shop, {"user 4": 1}, first=900)
    done = await put_back(shop.redis, tmp_path, later)
    assert done.forgotten == 0
    assert (await shop.users.load(["user 4"]))["user 4"].version == 3


async def test_user_dropped_by_a_restore_is_restored_by_another(shop: Workshop, tmp_path: Path) -> None:
    early = await take(shop, tmp_path)
    await learn(shop, {"late": 2}, first=700)
    late = await take(shop, tmp_path)
    wanted = await stored(shop)
    await put_back(shop.redis, tmp_path, early)
    assert "late" not in await stored(shop)
    after_drop = await take(shop, tmp_path)
    assert after_drop.users == early.users
    done = await put_back(shop.redis, tmp_path, late)
    assert done.forgotten == 0
    assert learned(await stored(shop)) == learned(wanted)
