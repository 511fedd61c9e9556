"""An app for tests of rewards, and calls to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from redis.asyncio import Redis

from metaban.service.engine.engine import Engine
from metaban.service.engine.registry import EngineRegistry
from metaban.service.http.app import create_app
from metaban.service.telemetry.metrics import Metrics
from metaban.store.decisions.decisions import DecisionRecord, DecisionStore
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceStore
from metaban.store.users.users import UserStore
from tests.service.engines import settings

ARMS = [{"id": f"a{n}", "features": [n, 1 - n, 0.5]} for n in range(3)]
KEYS = NamespaceKeys("shop", 2)
WINDOW_MS = 3_600_000


@asynccontextmanager
async def served(url: str, **changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    """A client of an app for the namespace `shop`, and its engine."""
    configured = settings(reward_window_s=WINDOW_MS // 1_000, late_window_s=600, **changes)
    metrics = Metrics()
    recommenders = EngineRegistry(configured, url, metrics)
    app = create_app(configured, recommenders, metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        yield client, recommenders.default


async def ask(service: httpx.AsyncClient, decision_id: str, **changes: Any) -> dict[str, Any]:
    body = {"user_id": "u", "arms": ARMS, "decision_id": decision_id, **changes}
    answer = await service.post("/recommend", json=body)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def tell(service: httpx.AsyncClient, decision_id: str, reward: float = 1, **more: Any) -> httpx.Response:
    return await service.post("/feedback", json={"decision_id": decision_id, "reward": reward, **more})


def codes(response: httpx.Response) -> list[str]:
    assert response.status_code == 202, response.text
    return [each["code"] for each in response.json()["rejected"]]


async def change(client: Redis, decision_id: str, **changes: Any) -> DecisionRecord:
    """Change a stored decision."""
    stored = await DecisionStore(client, KEYS, ttl_s=60).get(decision_id)
    assert stored is not None
    changed = replace(stored, **changes)
    await client.execute_command("SET", KEYS.decision(decision_id), changed.encode(), "KEEPTTL")
    return changed


async def backdate(client: Redis, decision_id: str, by_ms: int) -> None:
    stored = await DecisionStore(client, KEYS, ttl_s=60).get(decision_id)
    assert stored is not None
    await change(client, decision_id, created_ms=stored.created_ms - by_ms)


async def users(client: Redis) -> UserStore:
    record = await NamespaceStore(client).load("shop")
    assert record is not None
    return UserStore(client, record.keys, record.store_id, samples_kept=20)


async def waiting(client: Redis) -> set[bytes]:
    return {member for each in range(2) for member in await client.zrange(KEYS.awaiting(each), 0, -1)}


async def learned(client: Redis, user: str = "u") -> list[tuple[float, bool]]:
    """Reward and `by_default` of each stored sample."""
    kept = (await (await users(client)).load_samples([user])).get(user, [])
    return [(sample.reward, sample.by_default) for sample in kept]
