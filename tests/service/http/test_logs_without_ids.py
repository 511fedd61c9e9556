"""No log line of service or worker carries an id that a client chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from tests.service.engine.reward_calls import ARMS, KEYS, WINDOW_MS, backdate, served
from tests.service.engines import worker_running
from tests.worker.workshop import make_event, soon

#: Part of every id in this test.
MARK = "ann-smith"
USER = f"user-{MARK}"
PARTITION = KEYS.partition_of(USER)


@contextmanager
def complete_lines() -> Iterator[list[dict[str, Any]]]:
    """All log lines, with their context and the text of exceptions."""
    lines: list[dict[str, Any]] = []

    def collect(_: object, __: str, line: dict[str, Any]) -> dict[str, Any]:
        lines.append(line)
        raise structlog.DropEvent

    processors = structlog.get_config()["processors"]
    before = list(processors)
    # In place: loggers that are bound already hold this list.
    processors[:] = [structlog.contextvars.merge_contextvars, structlog.processors.format_exc_info, collect]
    try:
        yield lines
    finally:
        processors[:] = before


async def use_marked_ids(service: httpx.AsyncClient, redis: Redis, client: Redis) -> None:
    async def ask(name: str, **more: Any) -> int:
        body = {"user_id": USER, "arms": ARMS, "decision_id": f"{MARK}-{name}", **more}
        return (await service.post("/recommend", json=body)).status_code

    async def tell(name: str, **more: Any) -> int:
        body = {"decision_id": f"{MARK}-{name}", "reward": 1, "event_id": f"{MARK}-event-{name}", **more}
        return (await service.post("/feedback", json=body)).status_code

    assert [await ask(name) for name in ("one", "one", "late", "damaged")] == [200] * 4
    assert await ask("one", k=2) == 409
    assert await ask("more", arms=[{"id": MARK, "features": {MARK: "x"}}]) == 422
    assert [await tell("one"), await tell("one"), await tell("none"), await tell("one", arm_id=MARK)] == [
        202, 202, 404, 422,
    ]  # fmt: skip
    await backdate(client, f"{MARK}-late", WINDOW_MS + 5_000)
    assert await tell("late") == 202
    assert await ask("deferred", deferred=True) == 200
    for name, status in (("deferred", 200), ("none", 404)):
        assert (await service.post(f"/decisions/{MARK}-{name}/activate")).status_code == status
    await redis.set(KEYS.decision(f"{MARK}-damaged"), f'{{"user_id": "{USER}"}}')
    assert (await ask("damaged"), await tell("damaged")) == (500, 404)
    assert (await service.get(f"/admin/users/{USER}")).status_code == 200
    await redis.rename(KEYS.decided(USER), KEYS.decided("other"))
    await redis.set(KEYS.decided(USER), MARK)
    assert await ask("unnoted") == 500
    assert (await service.get(f"/{MARK}")).status_code == 404


async def bury_marked_events(service: httpx.AsyncClient, redis: Redis) -> None:
    """Events that a worker cannot learn, one of them unreadable."""
    event = make_event(USER, 1, reward=7.0).encode()
    for changes in ({}, {b"d": MARK.encode() + b"\xff"}, {b"f": MARK.encode()}, {b"m": MARK.encode()}):
        await redis.xadd(KEYS.events(PARTITION), {**event, b"id": MARK.encode(), **changes})

    async def buried() -> bool:
        return await redis.xlen(KEYS.dead_letters(PARTITION)) == 4

    await soon(buried)
    letters = (await service.get("/admin/dead-letters")).json()["letters"]
    assert len(letters) == 4
    assert MARK in str(letters)


@pytest.mark.usefixtures("short_tails")
async def test_no_line_carries_an_id_of_a_client(
    redis: Redis, client: Redis, valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with complete_lines() as lines:
        async with served(valkey_url, redis_url=valkey_url) as (service, _):
            await use_marked_ids(service, redis, client)
            async with worker_running(valkey_url):
                await bury_marked_events(service, redis)
            assert (await service.delete(f"/admin/users/{USER}")).status_code == 200
    assert {line["event"] for line in lines} >= {
        "request", "rewards_late", "decision_damaged", "unexpected_error", "event_dead_lettered", "user_forgotten",
        "decision_index_damaged",
    }  # fmt: skip
    assert [line for line in lines if MARK in repr(line)] == []
    assert MARK not in caplog.text
