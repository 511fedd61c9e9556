"""A namespace of two partitions, its stores, and functions that make records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.catalogue import CatalogueStore
from metaban.store.events.event import RewardEvent
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.users.records import UserState
from metaban.store.users.users import UserStore
from tests.store.helpers import MakeCatalogue, MakeEvent, MakeState, Picture


@pytest.fixture
async def record(redis: Redis) -> NamespaceRecord:
    return await NamespaceStore(redis).open_or_create("shop", partitions=2, seed=7, learner={"kind": "linear"})


@pytest.fixture
def keys(record: NamespaceRecord) -> NamespaceKeys:
    return record.keys


@pytest.fixture
def stream(redis: Redis, keys: NamespaceKeys) -> EventStream:
    return EventStream(redis, keys, dedupe_window_s=60, backlog_limit=100)


@pytest.fixture
def users(redis: Redis, record: NamespaceRecord) -> UserStore:
    return UserStore(redis, record.keys, record.store_id, samples_kept=3)


@pytest.fixture
def neighbours(keys: NamespaceKeys) -> list[str]:
    """Users of partition 0."""
    return [user for user in (f"user {n}" for n in range(40)) if keys.partition_of(user) == 0][:5]


@pytest.fixture
def make_event() -> MakeEvent:
    def make(user_id: str, event_id: str, **changes: object) -> RewardEvent:
        fields: dict[str, object] = {
            "event_id": event_id,
            "decision_id": f"decision of {event_id}",
            "user_id": user_id,
            "arm_id": "arm é}{",
            "features": np.array([0.5, -1.0, 3.25], dtype=np.float32),
            "reward": 0.1,
            "propensity": 0.98,
            "epoch": 4,
            "decided_ms": 1_000,
            "received_ms": 2_000,
        }
        return RewardEvent(**{**fields, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_state() -> MakeState:
    def make(user_id: str, version: int, *, incarnation: int = 0, epoch: int = 0) -> UserState:
        tensors = {"A": np.eye(3) * version, "b": np.arange(3, dtype=np.float32)}
        return UserState(user_id, incarnation, version, epoch, tensors)

    return make


@pytest.fixture
def picture(redis: Redis) -> Picture:
    """All contents of the store as bytes."""

    async def take() -> dict[bytes, object]:
        return {key: await redis.dump(key) async for key in redis.scan_iter()}

    return take


@pytest.fixture
def make_catalogue(redis: Redis, record: NamespaceRecord) -> MakeCatalogue:
    def make(**changes: Any) -> CatalogueStore:
        return CatalogueStore(redis, record.keys, record.store_id, **{"arms_max": 1_000, **changes})

    return make


@pytest.fixture
def arms(make_catalogue: MakeCatalogue) -> CatalogueStore:
    return make_catalogue()
