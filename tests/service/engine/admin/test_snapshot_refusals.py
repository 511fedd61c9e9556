"""Refused snapshots and restores write nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.models.default.learner import PosteriorLearner
from metaban.models.settings import PosteriorSettings
from metaban.service.engine.admin.snapshots import LearnerRecords
from metaban.store.errors import SnapshotError, StoreReset
from metaban.store.namespaces import NamespaceStore
from metaban.store.snapshots.records import rules_for
from metaban.store.snapshots.restore_intent import RestoreStore
from tests.service.snapshots import (
    RULES,
    in_place,
    in_small_parts,
    kept,
    learn,
    learned,
    put_back,
    stored,
    take,
)
from tests.worker.workshop import NAME, OpenWorkshop, Workshop, layout, small_default


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_parts(monkeypatch)


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    shop = await open_workshop(partitions=3)
    await in_place(shop)
    return shop


async def test_no_epoch_is_published_while_a_restore_is_unfinished(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    restores = RestoreStore(shop.redis, shop.keys, shop.record.store_id)
    assert await shop.epochs.acquire_lease("gone", 60_000)
    begun = await restores.begin(manifest.id, lease_token="gone", least_number=1)
    unfinished = await restores.unfinished()
    assert unfinished == begun
    number = await shop.epoch_number()
    # Not even with the lease.
    epoch = await shop.epochs.current()
    assert epoch is not None
    following = replace(epoch, number=epoch.number + 1, follows=epoch.stamp)
    assert not await shop.epochs.publish(following, lease_token="gone")
    await shop.epochs.release_lease("gone")
    unfinished = await restores.unfinished()
    assert unfinished is not None
    assert not unfinished.alive
    await learn(shop, {f"user {n}": 10 for n in range(12)}, first=4_000)
    states = await stored(shop)
    await shop.epoch_trainer().tick()
    assert await shop.epoch_number() == number
    assert await stored(shop) == states
    with pytest.raises(SnapshotError, match="not finished"):
        await take(shop, tmp_path)
    done = await put_back(shop.redis, tmp_path, manifest)
    assert done.epoch == begun.target
    assert await restores.unfinished() is None


async def test_superseded_restore_writes_nothing(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    restores = RestoreStore(shop.redis, shop.keys, shop.record.store_id)
    assert await shop.epochs.acquire_lease("slow", 60_000)
    slow = await restores.begin(manifest.id, lease_token="slow", least_number=1)
    await shop.epochs.release_lease("slow")
    await put_back(shop.redis, tmp_path, manifest)
    states, number = await stored(shop), await shop.epoch_number()
    records = [record for record in kept(tmp_path, manifest).values() if shop.keys.partition_of(record.user_id) == 1]
    with pytest.raises(SnapshotError, match="another restore"):
        await restores.write(slow, 1, records, applied=0)
    epoch = await shop.epochs.current()
    assert epoch is not None
    assert await shop.epochs.acquire_lease("slow", 60_000)
    with pytest.raises(SnapshotError, match="another restore"):
        await restores.finish(slow, replace(epoch, number=epoch.number + 1), lease_token="slow")
    assert (await stored(shop), await shop.epoch_number()) == (states, number)


async def test_restore_waits_for_the_lease_and_times_out(shop: Workshop, tmp_path: Path) -> None:
    await shop.epochs.acquire_lease("trainer", 60_000)
    for work in (take(shop, tmp_path, lease_wait_s=0.1),):
        with pytest.raises(SnapshotError, match="under way"):
            await work
    await shop.epochs.release_lease("trainer")
    manifest = await take(shop, tmp_path)
    await shop.epochs.acquire_lease("trainer", 60_000)
    before = await stored(shop)
    with pytest.raises(SnapshotError, match="under way"):
        await put_back(shop.redis, tmp_path, manifest, lease_wait_s=0.1)
    assert await stored(shop) == before


async def test_snapshot_without_an_epoch_is_refused(open_workshop: OpenWorkshop, tmp_path: Path) -> None:
    shop = await open_workshop(fixed=False)
    with pytest.raises(SnapshotError, match="nothing"):
        await take(shop, tmp_path)
    shop = await open_workshop()
    with pytest.raises(SnapshotError, match="no epoch yet"):
        await take(shop, tmp_path)
    assert os.listdir(tmp_path) == []


async def test_snapshot_of_another_structure_is_refused(shop: Workshop, tmp_path: Path, redis: Redis) -> None:
    manifest = await take(shop, tmp_path)

    async def refused(match: str, namespace: str = NAME, **options: object) -> None:
        before = {key: await redis.dump(key) async for key in redis.scan_iter()}
        with pytest.raises(SnapshotError, match=match):
            await put_back(shop.redis, tmp_path, manifest, namespace, **options)
        assert {key: await redis.dump(key) async for key in redis.scan_iter()} == before

    await refused("is of namespace shop", "other")
    namespaces = NamespaceStore(shop.redis)
    await namespaces.open_or_create("wide", partitions=3, seed=0, learner=small_default(width=7).to_json())
    await refused("its width is 7", "wide", rename=True)
    await namespaces.open_or_create("split", partitions=4, seed=0, learner=small_default().to_json())
    await refused("4 partitions", "split", rename=True)
    laid = await namespaces.open_or_create("laid", partitions=3, seed=0, learner=small_default().to_json())
    await namespaces.set_layout(laid, {**(shop.record.layout or {}), "context": 1})
    await refused("laid out", "laid", rename=True)
    # Into a new namespace it is restored.
    done = await put_back(shop.redis, tmp_path, manifest, "copy", rename=True)
    record = await namespaces.load("copy")
    assert record is not None
    copy = Workshop(shop.redis, record, shop.compute, samples_kept=5)
    assert learned(await stored(copy)) == learned(await stored(shop))
    assert done.users == 12


async def test_partitions_that_lost_everything_are_restored(shop: Workshop, tmp_path: Path) -> None:
    before = await stored(shop)
    manifest = await take(shop, tmp_path)
    for key in [key async for key in shop.redis.scan_iter("metaban:{shop:p01}:*")]:
        await shop.redis.delete(key)
    with pytest.raises(StoreReset):
        await NamespaceStore(shop.redis).open_or_create(NAME, partitions=3, seed=0, learner=shop.record.learner)
    await put_back(shop.redis, tmp_path, manifest)
    assert learned(await stored(shop)) == learned(before)
    await NamespaceStore(shop.redis).open_or_create(NAME, partitions=3, seed=0, learner=shop.record.learner)
    await learn(shop, dict.fromkeys(before, 1), first=9_000)
    assert sum((await shop.versions()).values()) == manifest.events + 12


async def test_restore_into_an_emptied_store_is_refused(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    restores = RestoreStore(shop.redis, shop.keys, shop.record.store_id)
    await shop.epochs.acquire_lease("me", 60_000)
    begun = await restores.begin(manifest.id, lease_token="me", least_number=1)
    await shop.redis.flushall()
    for work in (
        restores.write(begun, 0, [], applied=0),
        restores.begin(manifest.id, lease_token="me", least_number=1),
    ):
        with pytest.raises(StoreReset):
            await work
    assert await shop.redis.dbsize() == 0


@pytest.mark.parametrize(
    ("learner", "layout_"),
    [
        ({"preset": "nobody's"}, {}),
        ({"width": "wide"}, {}),
        ({"from the future": 1}, {}),
        ({}, {"arm": None}),
        ({}, {"arm": 1 << 60}),
        ({"width": 1 << 40}, {}),
        ({}, {"unknown": 1}),
    ],
)
def test_invalid_learners_are_refused(learner: dict[str, object], layout_: dict[str, object]) -> None:
    with pytest.raises(SnapshotError, match="this version"):
        rules_for(RULES, {**small_default().to_json(), **learner}, {**layout().to_json(), **layout_})


def test_an_epoch_has_as_many_rows_as_it_knows_arms() -> None:
    """The number of arms is not fixed by the learner, but all tensors of arms have it."""
    learner = PosteriorLearner(PosteriorSettings(), 3)
    records = LearnerRecords(learner)
    epoch = {name: tensor.numpy() for name, tensor in learner.initial_shared().items()}
    grown = epoch | {name: np.repeat(epoch[name], 7, axis=0) for name in learner.growing}
    for sound in (epoch, grown):
        records.check_epoch(sound)
    for name in learner.growing:
        missing = {other: array for other, array in grown.items() if other != name}
        for damaged in (grown | {name: epoch[name]}, grown | {name: grown[name][:, None]}, missing):
            with pytest.raises(ValueError, match=r"arm_.* have the wrong shape, or are missing or unknown"):
                records.check_epoch(damaged)
