"""Helpers of the store's tests: records, and steps shared by several tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from metaban.store.catalogue import ArmWrite, CatalogueStore
from metaban.store.codec import Sample, encode_tensors
from metaban.store.decisions.decisions import DecidedItem, DecisionRecord
from metaban.store.errors import StoreUnavailable
from metaban.store.events.event import RewardEvent
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.shared.epochs import Epoch
from metaban.store.snapshots.file import SnapshotWriter
from metaban.store.snapshots.manifest import Manifest, new_id
from metaban.store.snapshots.records import UserRecord
from metaban.store.users.records import UserState, UserUpdate
from metaban.store.users.users import UserStore

MakeEvent = Callable[..., RewardEvent]
MakeState = Callable[..., UserState]
MakeCatalogue = Callable[..., CatalogueStore]
Picture = Callable[[], Awaitable[dict[bytes, object]]]

#: One key in each third of the slots of a cluster.
CLUSTER_KEYS = ["k3", "k1", "k0"]
SOON_S = 40.0
SNAPSHOT_KEYS = NamespaceKeys("shop", 2)
SNAPSHOT_EPOCH = Epoch(4, 9, {"mu": np.arange(3.0)}, ("ann",), 5, 2)


def make_decision(decision_id: str = "d1", fingerprint: str = "00ff") -> DecisionRecord:
    items = tuple(DecidedItem(f"arm {n}", n + 1, 0.1 * n, 0.3, 0.2, 1 / 3, 4) for n in range(2))
    features = np.arange(6, dtype=np.float32).reshape(2, 3)
    return DecisionRecord(
        decision_id, "ann", fingerprint, items, features, features[:, :1] + 0.5, "ucb-floor", 3, 8, None, 1_234
    )


def same(one: DecisionRecord | None, two: DecisionRecord) -> bool:
    """Compare by value: the header of a record has no fixed order, so equal decisions may differ in bytes."""
    names = [name for name in DecisionRecord.__slots__ if name not in ("features", "phi")]
    return (
        one is not None
        and all(getattr(one, name) == getattr(two, name) for name in names)
        and np.array_equal(one.features, two.features)
        and np.array_equal(one.phi, two.phi)
    )


def decided(user: str, decision_id: str, *, incarnation: int = 0) -> DecisionRecord:
    return replace(make_decision(decision_id), user_id=user, incarnation=incarnation)


async def learn(
    stream: EventStream, users: UserStore, state: UserState, event: RewardEvent, expected: tuple[int, int] = (0, 0)
) -> str:
    """Apply one event of a user; returns its entry id."""
    await stream.enqueue([event])
    [delivery] = await stream.read([0], "one", count=9, block_ms=0)
    update = UserUpdate(state, expected[1], expected[0], [event.sample()], [delivery.entry_id])
    await users.apply(0, "one", [delivery.entry_id], [update])
    return delivery.entry_id


async def put_arms(arms: CatalogueStore, *ids: str, at: float = 1.0, ms: int = 5) -> list[int]:
    outcomes = await arms.change([ArmWrite.put(arm, [at]) for arm in ids], now_ms=ms)
    return [outcome.version for outcome in outcomes]


async def remove_arms(arms: CatalogueStore, *ids: str) -> list[int]:
    return [outcome.version for outcome in await arms.change([ArmWrite.remove(arm) for arm in ids], now_ms=6)]


async def retry_until_available(attempt: Callable[[], object]) -> None:
    """Retry until the call raises no StoreUnavailable."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                await attempt()
                return
            except StoreUnavailable:
                await asyncio.sleep(0.05)


def user_record(user: str, version: int = 3, count: int = 2, **changes: Any) -> UserRecord:
    blobs = tuple(Sample(np.ones(2), 1.0, 0.5, 0, n, "a").encode() for n in range(count))
    state = encode_tensors({"b": np.full(3, float(version))}, {})
    return UserRecord(**{"user_id": user, "incarnation": 0, "version": version, "epoch": 4, "state": state,
                         "samples": blobs, **changes})  # fmt: skip


def manifest_of(writer: SnapshotWriter, users: int, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "id": new_id(0), "name": "", "namespace": "shop", "created_ms": 1, "metaban": "0", "learner": {}, "layout": {},
        "partitions": 2, "seed": 0, "epoch": 4, "users": users, "damaged": 0, "applied": (5, 6),
        "cursors": ("1-0", "0-0"), "members": tuple(writer.members), **changes,
    }  # fmt: skip
    return Manifest(**fields)


def write_snapshot(folder: Path, *chunks: list[UserRecord], users: int | None = None, **changes: Any) -> Path:
    """A snapshot with these chunks; each belongs to the partition of its first user."""
    with SnapshotWriter(folder) as writer:
        for chunk in chunks:
            writer.add_users(SNAPSHOT_KEYS.partition_of(chunk[0].user_id), chunk)
        writer.add_epoch(SNAPSHOT_EPOCH.encode())
        count = len({record.user_id for chunk in chunks for record in chunk}) if users is None else users
        return writer.finish(manifest_of(writer, count, **changes))
