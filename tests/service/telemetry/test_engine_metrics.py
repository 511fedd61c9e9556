"""Prometheus metrics of a real engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from metaban.service.engine.registry import EngineRegistry
from metaban.service.http.app import create_app
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceStore
from tests.worker.workshop import Workshop, soon

ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1, 2]}]}
KEYS = NamespaceKeys("shop", 2)


def values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_metrics_of_decisions_rewards_and_backlog(redis: Any, client: Any, valkey_url: str) -> None:
    settings, metrics = Settings(partitions=2, namespace="shop", backlog_limit=10), Metrics()
    app = create_app(settings, EngineRegistry(settings, valkey_url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        before = values((await http.get("/metrics")).text)
        assert before['metaban_backlog_events{namespace="shop"}'] == 0
        assert before['metaban_oldest_event_age_seconds{namespace="shop"}'] == 0
        for number in range(3):
            assert (await http.post("/recommend", json={**ASK, "decision_id": f"d{number}"})).status_code == 200
        for number, reward in ((0, 0.25), (1, 0.5), (1, 0.5)):
            answer = await http.post("/feedback", json={"decision_id": f"d{number}", "reward": reward})
            assert answer.status_code == 202
        # An event waiting since 1970, and a dead letter.
        await client.xadd(KEYS.dead_letters(1), {"dead_reason": "poison"})
        other = 1 - KEYS.partition_of("u")
        await client.xadd(KEYS.events(other), {"poison": "1"}, id="1000-1")
        found = values((await http.get("/metrics")).text)
    for name, value in {
        'metaban_backlog_events{namespace="shop"}': 3,
        'metaban_backlog_fill_ratio{namespace="shop"}': 0.2,
        'metaban_dead_letters{namespace="shop"}': 1,
        'metaban_events{namespace="shop",state="enqueued"}': 2,
        'metaban_reward_sum{namespace="shop"}': 0.75,
        'metaban_reward_count{namespace="shop"}': 2,
        'metaban_rewards_total{namespace="shop",outcome="duplicate"}': 1,
        'metaban_batch_requests_sum{namespace="shop"}': 3,
        'metaban_stage_seconds_count{namespace="shop",stage="intake"}': 3,
        'metaban_stage_seconds_count{namespace="shop",stage="load"}': 3,
        'metaban_stage_seconds_count{namespace="shop",stage="score"}': 3,
        'metaban_stage_seconds_count{namespace="shop",stage="record"}': 3,
        'metaban_store_up{namespace="shop"}': 1,
        "metaban_ready": 1,
    }.items():
        assert found[name] == value, name
    assert found['metaban_oldest_event_age_seconds{namespace="shop"}'] > 1e9
    assert found["process_resident_memory_bytes"] > 0


async def test_an_epoch_that_is_due_and_not_published(
    client: Any, redis: Any, valkey_url: str, compute: Executor
) -> None:
    settings, metrics = Settings(partitions=1, namespace="shop"), Metrics()
    app = create_app(settings, EngineRegistry(settings, valkey_url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        for number in range(16):
            assert (await http.post("/recommend", json={**ASK, "decision_id": f"d{number}"})).status_code == 200
            answer = await http.post("/feedback", json={"decision_id": f"d{number}", "reward": 0.5})
            assert answer.status_code == 202
        record = await NamespaceStore(client).load("shop")
        assert record is not None
        shop = Workshop(client, record, compute, samples_kept=50)
        trainer = shop.epoch_trainer()
        await trainer.tick()

        def shown(value: int) -> Callable[[], Awaitable[bool]]:
            async def holds() -> bool:
                return values((await http.get("/metrics")).text).get('metaban_epoch_due{namespace="shop"}') == value

            return holds

        await soon(shown(0))
        await shop.publisher().publish(0, await shop.streams.read([0], "c1", count=100, block_ms=10))
        await soon(shown(1))
        await trainer.tick()
        await soon(shown(0))


async def test_a_namespace_without_requests_has_few_lines(redis: Any, valkey_url: str) -> None:
    settings, metrics = Settings(partitions=2, namespace="shop"), Metrics()
    app = create_app(settings, EngineRegistry(settings, valkey_url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        body = {"name": "idle", "arm_features": 2, "context_features": 0}
        assert (await http.post("/admin/namespaces", json=body)).status_code == 201
        idle = [name for name in values((await http.get("/metrics")).text) if 'namespace="idle"' in name]
        assert not [name for name in idle if "_bucket" in name]
        assert len(idle) <= 40
        assert (await http.post("/recommend?namespace=idle", json=ASK)).status_code == 200
        used = values((await http.get("/metrics")).text)
    assert used['metaban_batch_requests_count{namespace="idle"}'] == 1
    assert used['metaban_stage_seconds_count{namespace="idle",stage="score"}'] == 1


@pytest.mark.single_node("one read covers all logs of a server, not of a cluster")
async def test_replicas_of_all_namespaces_share_connections(redis: Redis, valkey_url: str) -> None:
    settings, metrics = Settings(partitions=16, namespace="shop"), Metrics()
    app = create_app(settings, EngineRegistry(settings, valkey_url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        for name in ("a", "b"):
            body = {"name": name, "arm_features": 2, "context_features": 0}
            assert (await http.post("/admin/namespaces", json=body)).status_code == 201

        async def followed() -> bool:
            return sum("b" in client["flags"] for client in await redis.client_list()) == 2

        await soon(followed, "one read for each namespace")
        assert len(await redis.client_list()) < 16
