"""Requests that wait for learning, while no worker runs: they take no places from other requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import httpx
import pytest
from redis.asyncio import Redis

from metaban.service.http import admission
from tests.service.apps import ARMS, running_app
from tests.worker.workshop import soon

WAIT_S = 30.0
#: Longer than a test: nothing is learned, and no wait ends by itself.
NEVER_S = 300.0
ASK = {"user_id": "u", "arms": ARMS}
FUTURE = {**ASK, "min_version": 99}


async def gauges(client: httpx.AsyncClient) -> tuple[int, int]:
    """Requests that wait, and those in progress without this one."""
    text = (await client.get("/metrics")).text
    waiting, inflight = (
        float(re.findall(rf"^metaban_{name}_requests (\S+)$", text, re.M)[0]) for name in ("waiting", "inflight")
    )
    return int(waiting), int(inflight) - 1


async def settled(client: httpx.AsyncClient, expected: tuple[int, int]) -> None:
    async def reached() -> bool:
        return await gauges(client) == expected

    await soon(reached)


async def rewarded(client: httpx.AsyncClient, query: str = "") -> httpx.Response:
    """The answer to a reward of a new decision."""
    decided = await client.post("/recommend", json=ASK)
    assert decided.status_code == 200, decided.text
    return await client.post(f"/feedback{query}", json={"decision_id": decided.json()["decision_id"], "reward": 1})


async def cancel(tasks: list[asyncio.Task[httpx.Response]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_waiting_requests_do_not_count_as_concurrent(redis: Redis, valkey_url: str) -> None:
    limits = {"max_concurrent": 2, "max_connections": 16}  # and so seven may wait
    async with running_app(valkey_url, wait_applied_timeout_s=NEVER_S, **limits) as (_, client):
        kinds: list[Callable[[], Awaitable[httpx.Response]]] = [
            lambda: client.post("/recommend", json=FUTURE),
            lambda: client.post("/recommend/batch", json={"requests": [FUTURE] * 3}),
            lambda: rewarded(client, "?wait=applied"),
        ]
        waiting = []
        for number in range(7):
            waiting.append(asyncio.create_task(kinds[number % 3]()))  # type: ignore[arg-type]
            await settled(client, (number + 1, 0))
        for _ in range(5):
            assert (await rewarded(client)).status_code == 202
        refused = await asyncio.wait_for(client.post("/recommend", json=FUTURE), WAIT_S)
        assert refused.status_code == 503
        assert refused.json()["type"] == "/problems/version-not-reached"
        assert refused.headers["retry-after"] == "1"
        told = await asyncio.wait_for(rewarded(client, "?wait=applied"), WAIT_S)
        assert (told.status_code, told.json()["accepted"], told.json()["applied"]) == (202, 1, False)
        assert 'metaban_rejected_requests_total{reason="waiting"} 2.0' in (await client.get("/metrics")).text
        assert not any(task.done() for task in waiting)
        await cancel(waiting)
        await settled(client, (0, 0))


async def test_bodies_of_waiting_requests_leave_room_for_others(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "BODIES_BYTES", 0)
    long = {**ASK, "arms": [{"id": "a" * 200, "features": [1.0] * 150}], "min_version": 99}  # most of a kibibyte
    async with running_app(valkey_url, wait_applied_timeout_s=NEVER_S, max_body_bytes=1_024) as (_, client):
        waiting = []
        for number in range(admission.BODIES):
            waiting.append(asyncio.create_task(client.post("/recommend", json=long)))
            await settled(client, (number + 1, 0))
        refused = await asyncio.wait_for(client.post("/recommend", json=long), WAIT_S)
        assert refused.json()["type"] == "/problems/version-not-reached"
        reached = await client.post("/recommend", json={**long, "min_version": 0})
        assert reached.status_code == 200, reached.text
        await cancel(waiting)
        await settled(client, (0, 0))
