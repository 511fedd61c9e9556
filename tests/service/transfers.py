"""Users of whom enough is kept to be asked about, and jobs as workers write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

from service.routes.transfer import RESULT_EXAMPLE
from store.keys import NamespaceKeys
from store.namespaces import Namespaces
from store.transfer import TARGET_SAMPLES_MIN, TransferStore

KEYS = NamespaceKeys("default", 2)
#: What a worker writes of a job that is done.
RESULT: dict[str, Any] = RESULT_EXAMPLE


async def transfer_store(redis: Redis, namespace: str = "default") -> TransferStore:
    record = await Namespaces(redis).load(namespace)
    assert record is not None
    return TransferStore(redis, record.keys, record.store_epoch)


async def keep(
    redis: Redis, users: Iterable[str], *, samples: int = TARGET_SAMPLES_MIN, keys: NamespaceKeys = KEYS
) -> None:
    """As much of users as is looked at before a worker has to."""
    for user in users:
        await redis.hset(keys.user(user), mapping={"incarnation": 0, "version": samples, "epoch": 0})
        await redis.hset(keys.versions(keys.partition_of(user)), user, f"0:{samples}")
        await redis.delete(keys.samples(user))
        await redis.rpush(keys.samples(user), *[b"sample"] * samples)
