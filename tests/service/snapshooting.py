"""A namespace that learns, snapshots of it, and what both hold."""

from __future__ import annotations

from pathlib import Path

from redis.asyncio import Redis

from service.snapshot_rules import KnownLearners
from store.epochs import Epoch
from store.snapshot_file import SnapshotReader
from store.snapshot_manifest import Manifest
from store.snapshot_records import UserRecord
from store.snapshot_restore import Restored, restore_snapshot
from store.snapshots import create_snapshot
from tests.worker.workshop import NAME, Workshop

RULES = KnownLearners()


async def take(shop: Workshop, folder: Path, **options: object) -> Manifest:
    return await create_snapshot(shop.redis, shop.record, folder, RULES, **options)  # type: ignore[arg-type]


async def put_back(
    redis: Redis, folder: Path, manifest: Manifest, namespace: str = NAME, **options: object
) -> Restored:
    path = folder / f"{manifest.id}.tar"
    return await restore_snapshot(redis, path, namespace, RULES, **options)  # type: ignore[arg-type]


def kept(folder: Path, manifest: Manifest) -> dict[str, UserRecord]:
    """What a file holds of users."""
    with SnapshotReader(folder / f"{manifest.id}.tar") as reader:
        chunks = [chunk for partition in range(manifest.partitions) for chunk in reader.chunks(partition)]
    records = [record for chunk in chunks for record in chunk]
    assert len({record.user_id for record in records}) == len(records)
    return {record.user_id: record for record in records}


def kept_epoch(folder: Path, manifest: Manifest) -> Epoch:
    with SnapshotReader(folder / f"{manifest.id}.tar") as reader:
        return reader.epoch()


async def stored(shop: Workshop) -> dict[str, UserRecord]:
    """What the store holds of users who have a state."""
    found = {}
    for partition in range(shop.record.partitions):
        for user, (incarnation, version) in (await shop.users.versions(partition)).items():
            fields = await shop.redis.hgetall(shop.keys.user(user))
            assert (int(fields[b"incarnation"]), int(fields[b"version"])) == (incarnation, version)
            if b"state" in fields:
                samples = await shop.redis.lrange(shop.keys.samples(user), 0, -1)
                found[user] = UserRecord(
                    user, incarnation, version, int(fields[b"epoch"]), fields[b"state"], tuple(samples)
                )
    return found


def learned(records: dict[str, UserRecord]) -> dict[str, tuple[int, bytes, tuple[bytes, ...]]]:
    """What learning made of users; not under which incarnation or epoch they go."""
    return {user: (record.version, record.state, record.samples) for user, record in records.items()}


async def in_place(shop: Workshop, names: int = 12, **plan: int) -> None:
    """Users with some events each, an epoch of their own, and everyone fitted under it."""
    await shop.meta()._tick()
    await shop.learn(plan or {f"user {n}": 1 + n % 4 for n in range(names)})
    meta = shop.meta()
    await meta._tick()
    await meta._tick()
