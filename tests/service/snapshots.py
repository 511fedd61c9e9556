"""Snapshots and restores of a `Workshop`, and the users they hold."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from metaban.service.engine.admin.snapshots import KnownLearners
from metaban.store.events.event import RewardEvent
from metaban.store.shared.epochs import Epoch
from metaban.store.snapshots.create import create_snapshot
from metaban.store.snapshots.file import SnapshotReader
from metaban.store.snapshots.manifest import Manifest
from metaban.store.snapshots.records import UserRecord
from metaban.store.snapshots.restore import Restored, restore_snapshot
from tests.worker.workshop import NAME, Workshop, make_event

RULES = KnownLearners()


async def take(shop: Workshop, folder: Path, **options: object) -> Manifest:
    return await create_snapshot(shop.redis, shop.record, folder, RULES, **options)  # type: ignore[arg-type]


async def put_back(
    redis: Redis, folder: Path, manifest: Manifest, namespace: str = NAME, **options: object
) -> Restored:
    path = folder / f"{manifest.id}.tar"
    return await restore_snapshot(redis, path, namespace, RULES, **options)  # type: ignore[arg-type]


def kept(folder: Path, manifest: Manifest) -> dict[str, UserRecord]:
    """The users in a snapshot file."""
    with SnapshotReader(folder / f"{manifest.id}.tar") as reader:
        chunks = [chunk for partition in range(manifest.partitions) for chunk in reader.chunks(partition)]
    records = [record for chunk in chunks for record in chunk]
    assert len({record.user_id for record in records}) == len(records)
    return {record.user_id: record for record in records}


def kept_epoch(folder: Path, manifest: Manifest) -> Epoch:
    with SnapshotReader(folder / f"{manifest.id}.tar") as reader:
        return reader.epoch()


async def stored(shop: Workshop) -> dict[str, UserRecord]:
    """The stored users with a state."""
    found = {}
    for partition in range(shop.record.partitions):
        for user, (incarnation, version) in (await shop.users.versions(partition)).items():
            stored_fields = await shop.redis.hgetall(shop.keys.user(user))
            assert (int(stored_fields[b"incarnation"]), int(stored_fields[b"version"])) == (incarnation, version)
            if b"state" in stored_fields:
                samples = await shop.redis.lrange(shop.keys.samples(user), 0, -1)
                start = await shop.redis.hget(shop.keys.start(user), "start")
                epoch, state = int(stored_fields[b"epoch"]), stored_fields[b"state"]
                found[user] = UserRecord(user, incarnation, version, epoch, state, tuple(samples), start or b"")
    return found


def learned(records: dict[str, UserRecord]) -> dict[str, tuple[int, bytes, tuple[bytes, ...]]]:
    """Version, state and samples of users, without incarnation and epoch."""
    return {user: (record.version, record.state, record.samples) for user, record in records.items()}


async def tallied(shop: Workshop) -> bool:
    """Whether every applied event is in a version or counted as forgotten."""
    for partition in range(shop.record.partitions):
        versions = sum(version for _, version in (await shop.users.versions(partition)).values())
        applied, undone = await shop.redis.hmget(shop.keys.counters(partition), "applied", "forgotten")
        if int(applied or 0) != versions + int(undone or 0):
            return False
    return True


async def event_of_now(shop: Workshop, user: str, number: int, **changes: Any) -> RewardEvent:
    """An event for the current incarnation of a user."""
    stands = await shop.redis.hget(shop.keys.versions(shop.keys.partition_of(user)), user) or b"0:0"
    return make_event(user, number, incarnation=int(stands.split(b":")[0]), **changes)


async def learn(shop: Workshop, plan: Mapping[str, int], *, first: int) -> None:
    """As `Workshop.learn`, with events for the current incarnations."""
    numbers = count(first)
    await shop.streams.enqueue(
        [await event_of_now(shop, user, next(numbers)) for user, events in plan.items() for _ in range(events)]
    )
    for partition in range(shop.record.partitions):
        deliveries = await shop.streams.read([partition], "c1", count=10_000, block_ms=1)
        await shop.publisher().publish(partition, deliveries)


async def in_place(shop: Workshop, names: int = 12, **plan: int) -> None:
    """Users with some events each, all fitted under an epoch derived from them."""
    await shop.epoch_trainer().tick()
    await shop.learn(plan or {f"user {n}": 1 + n % 4 for n in range(names)})
    meta = shop.epoch_trainer()
    await meta.tick()
    await meta.tick()


def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks small, so that few users fill several."""
    monkeypatch.setattr("metaban.store.snapshots.create.CHUNK_USERS", 3)
    monkeypatch.setattr("metaban.store.snapshots.create.LOAD_USERS", 2)
    monkeypatch.setattr("metaban.store.snapshots.create.MOVED_USERS", 4)
    monkeypatch.setattr("metaban.store.snapshots.restore.WRITE_USERS", 2)
