"""The epoch lease: kept by a busy process, lost by a killed or hanging one."""

from __future__ import annotations

import pytest
import redis as sync_redis
from redis.asyncio import Redis
from structlog.testing import capture_logs

from metaban.store.namespaces import NamespaceRecord
from metaban.store.shared import leases as module
from metaban.store.shared.epochs import EpochStore
from metaban.store.shared.leases import EPOCH_LEASE_MS, keep_lease
from tests.valkeys import block_until_renewed
from tests.worker.workshop import soon


@pytest.fixture
def epochs(client: Redis, record: NamespaceRecord) -> EpochStore:
    return EpochStore(client, record.keys, record.store_id)


@pytest.mark.single_node("the blocked event loop watches one server")
async def test_a_busy_event_loop_keeps_it(epochs: EpochStore, record: NamespaceRecord, valkey_url: str) -> None:
    assert await epochs.acquire_lease("me", EPOCH_LEASE_MS)
    async with keep_lease(epochs, "me"):
        with sync_redis.Redis.from_url(valkey_url) as store:
            block_until_renewed(store, record.keys.lease, times=3)  # 3 s: without renewals it would expire
        assert await epochs.renew_lease("me", EPOCH_LEASE_MS)
    assert not await epochs.renew_lease("me", EPOCH_LEASE_MS), "released at the end"


async def test_a_failed_renewal_is_logged_and_repeated(
    epochs: EpochStore, redis: Redis, record: NamespaceRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EPOCH_LEASE_MS", 300)
    key = record.keys.lease
    with capture_logs() as logs:
        await redis.rpush(key, "not a lease")

        async def failed() -> bool:
            return "lease_renewal_failed" in [line["event"] for line in logs]

        async def renewed() -> bool:
            return bool(await redis.pttl(key) > 0)

        async with keep_lease(epochs, "me"):
            await soon(failed)
            await redis.delete(key)
            await redis.set(key, "me", ex=1_000)
            await redis.persist(key)
            await soon(renewed)


async def test_a_lost_lease_is_logged_and_not_taken_back(
    epochs: EpochStore, redis: Redis, record: NamespaceRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EPOCH_LEASE_MS", 300)
    await redis.set(record.keys.lease, "another")
    with capture_logs() as logs:
        async with keep_lease(epochs, "me"):

            async def lost() -> bool:
                return [line["event"] for line in logs] == ["lease_lost"]

            await soon(lost)
    assert await redis.get(record.keys.lease) == b"another"


async def test_a_hanging_event_loop_gives_it_up(
    epochs: EpochStore, redis: Redis, record: NamespaceRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EPOCH_LEASE_MS", 300)
    monkeypatch.setattr(module, "HUNG_AFTER_S", 0.0)
    assert await epochs.acquire_lease("me", 300)
    with capture_logs() as logs:
        async with keep_lease(epochs, "me"):

            async def expired() -> bool:
                return not await redis.exists(record.keys.lease)

            await soon(expired)
    assert [line["event"] for line in logs] == ["lease_given_up"]


async def test_an_error_under_the_lease_releases_it(epochs: EpochStore, redis: Redis, record: NamespaceRecord) -> None:
    assert await epochs.acquire_lease("me", 60_000)
    with pytest.raises(ValueError, match="wrong"):
        async with keep_lease(epochs, "me"):
            raise ValueError("wrong")
    assert not await redis.exists(record.keys.lease)
