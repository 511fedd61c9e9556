"""The audit log: newest first, in pages."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from metaban.store.audit import AuditLog, AuditRecord
from metaban.store.errors import StoreReset
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceStore


async def test_lines_come_back_newest_first_in_pages(redis: Redis):
    record = await NamespaceStore(redis).open_or_create("shop", partitions=1, seed=0, learner={})
    log = AuditLog(redis, record.keys, record.store_id)
    for number in range(5):
        await log.add(AuditRecord("0a1b2c3d", "PATCH /admin/config", "", f"r-{number}", {"epsilon": number / 10}))
    first = await log.newest(3)
    rest = await log.newest(3, before=first[-1].cursor)
    assert [line.request_id for line in first + rest] == ["r-4", "r-3", "r-2", "r-1", "r-0"]
    assert first[0].detail == {"epsilon": 0.4}
    assert first[0].at_ms > 1_700_000_000_000
    assert await log.newest(3, before=rest[-1].cursor) == []


async def test_nothing_is_written_for_a_deleted_namespace(redis: Redis):
    namespaces = NamespaceStore(redis)
    record = await namespaces.open_or_create("shop", partitions=1, seed=0, learner={})
    log, line = AuditLog(redis, record.keys, record.store_id), AuditRecord("", "PATCH /admin/config", "", "r", {})
    await namespaces.delete(record)
    with pytest.raises(StoreReset):
        await log.add(line)
    assert await log.newest(3) == []
    await namespaces.open_or_create("shop", partitions=1, seed=0, learner={})
    with pytest.raises(StoreReset):
        await log.add(line)
    assert await log.newest(3) == []


@pytest.mark.parametrize("cursor", ["0-0", "", "1", "1-", "x-1", "1-1 ", f"{2**64}-0", f"0-{2**64}", "٣-1"])
async def test_an_invalid_cursor_is_refused(redis: Redis, cursor: str):
    with pytest.raises(ValueError, match="not a cursor"):
        await AuditLog(redis, NamespaceKeys("shop", 1), "e").newest(3, before=cursor)


@pytest.mark.parametrize("cursor", ["0-1", "1-0", f"{2**64 - 1}-{2**64 - 1}"])
async def test_a_cursor_at_the_limit_is_accepted(redis: Redis, cursor: str):
    assert await AuditLog(redis, NamespaceKeys("shop", 1), "e").newest(3, before=cursor) == []
