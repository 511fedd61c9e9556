"""The audit log: newest first, in pages."""

from __future__ import annotations

from redis.asyncio import Redis

from store.audit import AuditLine, AuditLog
from store.keys import NamespaceKeys


async def test_lines_come_back_newest_first_in_pages(redis: Redis):
    log = AuditLog(redis, NamespaceKeys("shop", 1))
    for number in range(5):
        await log.add(AuditLine("0a1b2c3d", "PATCH /admin/config", "", f"r-{number}", {"epsilon": number / 10}))
    first = await log.newest(3)
    rest = await log.newest(3, before=first[-1].cursor)
    assert [line.request_id for line in first + rest] == ["r-4", "r-3", "r-2", "r-1", "r-0"]
    assert first[0].detail == {"epsilon": 0.4}
    assert first[0].at_ms > 1_700_000_000_000
    assert await log.newest(3, before=rest[-1].cursor) == []
