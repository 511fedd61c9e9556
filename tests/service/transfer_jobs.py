"""Users with enough samples for transfer jobs, and the result of a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

from metaban.service.http.routes.transfer import RESULT_EXAMPLE
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceStore
from metaban.store.shared.transfer import TARGET_SAMPLES_MIN, TransferStore

KEYS = NamespaceKeys("default", 2)
#: The stored result of a finished job.
RESULT: dict[str, Any] = RESULT_EXAMPLE


async def transfer_store(redis: Redis, namespace: str = "default") -> TransferStore:
    record = await NamespaceStore(redis).load(namespace)
    assert record is not None
    return TransferStore(redis, record.keys, record.store_id)


async def keep(
    redis: Redis, users: Iterable[str], *, samples: int = TARGET_SAMPLES_MIN, keys: NamespaceKeys = KEYS
) -> None:
    """Store what the service checks of users: versions and the number of samples."""
    for user in users:
        await redis.hset(keys.user(user), mapping={"incarnation": 0, "version": samples, "epoch": 0})
        await redis.hset(keys.versions(keys.partition_of(user)), user, f"0:{samples}")
        await redis.delete(keys.samples(user))
        await redis.rpush(keys.samples(user), *[b"sample"] * samples)
