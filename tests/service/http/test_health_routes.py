"""Health, readiness and metrics over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from metaban.service.engine.commands import CheckResult, FeedbackOutcome, RejectedReward
from metaban.service.engine.reward_watch import LearningWarning
from metaban.service.http.app import create_app
from metaban.service.http.app_state import state_of
from metaban.service.http.protocol import LimitedProtocol
from metaban.service.settings.environment import Settings
from metaban.store.errors import StoreUnavailable
from metaban.store.keys import NamespaceKeys
from tests.service.http.sockets import serving
from tests.service.scripted_engine import ASK, ONE_REWARD, OneEngine, ScriptedEngine, scripted_app


async def test_liveness_and_readiness(api: Any, scripted: ScriptedEngine) -> None:
    assert (await api.get("/health/live")).json()["status"] == "live"
    response = await api.get("/health/ready")
    assert (response.status_code, response.json()["status"]) == (200, "ready")
    scripted.checks["replica"] = CheckResult(False, "is behind")
    response = await api.get("/health/ready")
    assert response.status_code == 503
    assert response.json() == {
        "status": "not ready",
        "checks": {"store": {"ok": True, "detail": "answers"}, "replica": {"ok": False, "detail": "is behind"}},
        "warnings": [],
    }


async def test_warnings_do_not_make_the_service_unready(api: Any, scripted: ScriptedEngine) -> None:
    scripted.warnings = [LearningWarning("rewards-missing", "send some")]
    response = await api.get("/health/ready")
    assert (response.status_code, response.json()["status"]) == (200, "ready")
    assert response.json()["warnings"] == [{"namespace": "default", "code": "rewards-missing", "detail": "send some"}]


async def test_degraded_is_ready(api: Any, scripted: ScriptedEngine) -> None:
    scripted.checks["store"] = CheckResult(False, "away", vital=False)
    response = await api.get("/health/ready")
    assert (response.status_code, response.json()) == (
        200,
        {"status": "degraded", "checks": {"store": {"ok": False, "detail": "away"}}, "warnings": []},
    )
    scripted.checks["replica"] = CheckResult(False, "is behind")
    response = await api.get("/health/ready")
    assert (response.status_code, response.json()["status"]) == (503, "not ready")


@pytest.mark.parametrize("damage", ["half", "another type"])
async def test_not_ready_while_the_record_of_a_restore_is_damaged(
    http: httpx.AsyncClient, redis: Redis, damage: str
) -> None:
    key = NamespaceKeys("default", 2).restoring
    await (redis.hset(key, "generation", "1") if damage == "half" else redis.set(key, "text"))
    with structlog.testing.capture_logs() as logs:
        response = await http.get("/health/ready")
        metrics = await http.get("/metrics")
    assert (response.status_code, response.json()["status"]) == (503, "not ready")
    assert [name for name, check in response.json()["checks"].items() if not check["ok"]] == ["restore"]
    assert "metaban_ready 0.0" in metrics.text.splitlines()
    assert {line["namespace"] for line in logs if line["event"] == "restore_unreadable"} == {"default"}
    await redis.delete(key)
    assert (await http.get("/health/ready")).status_code == 200


async def test_not_ready_while_stopping(scripted: ScriptedEngine) -> None:
    app = create_app(Settings(), OneEngine(scripted))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as api:
        assert (await api.get("/health/ready")).status_code == 200
        state_of(app).stopping.set()
        response = await api.get("/health/ready")
        assert (response.status_code, response.json()["status"]) == (503, "not ready")
        assert not response.json()["checks"]["service"]["ok"]
        assert (await api.get("/health/live")).status_code == 200
        assert (await api.post("/recommend", json=ASK)).status_code == 200


async def test_unlogged_decision_is_marked_and_counted(api: Any, scripted: ScriptedEngine) -> None:
    scripted.logged = False
    assert (await api.post("/recommend", json=ASK)).json()["logged"] is False
    lines = (await api.get("/metrics")).text.splitlines()
    assert 'metaban_unlogged_decisions_total{namespace="default"} 1.0' in lines
    assert 'metaban_decisions_total{cold_start="meta",namespace="default",policy="ucb-floor"} 1.0' in lines


async def test_metrics(api: Any, scripted: ScriptedEngine) -> None:
    await api.post("/recommend", json=ASK)
    scripted.outcome = FeedbackOutcome(2, 1, (RejectedReward(3, "unknown-decision", ""),), None)
    await api.post("/feedback", json={"events": [ONE_REWARD] * 4})
    await api.get("/made-up/by/a/client")
    for path in ("/docs", "/openapi.json"):
        await api.get(path)
    scripted.error = StoreUnavailable("gone")
    response = await api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    for line in (
        'metaban_decisions_total{cold_start="meta",namespace="default",policy="ucb-floor"} 1.0',
        'metaban_rewards_total{namespace="default",outcome="accepted"} 2.0',
        'metaban_rewards_total{namespace="default",outcome="duplicate"} 1.0',
        'metaban_rewards_total{namespace="default",outcome="rejected"} 1.0',
        'metaban_request_seconds_count{method="POST",route="/recommend",status="200"} 1.0',
        'metaban_request_seconds_count{method="GET",route="unmatched",status="404"} 1.0',
        'metaban_request_seconds_count{method="GET",route="/docs",status="200"} 1.0',
        'metaban_request_seconds_count{method="GET",route="/openapi.json",status="200"} 1.0',
    ):
        assert line in response.text.splitlines()
    assert "made-up" not in response.text


async def test_two_apps_do_not_share_metrics(api: Any, scripted: ScriptedEngine) -> None:
    await api.post("/recommend", json=ASK)
    async with scripted_app(ScriptedEngine()) as other:
        assert "metaban_decisions_total{" not in (await other.get("/metrics")).text


async def test_engine_starts_and_stops_with_the_app() -> None:
    scripted = ScriptedEngine()
    async with scripted_app(scripted):
        assert scripted.running
    assert not scripted.running


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json", "/nowhere"])
async def test_head_is_get_without_the_body(api: Any, path: str) -> None:
    got, headed = await api.get(path), await api.head(path)
    assert (headed.status_code, headed.content) == (got.status_code, b"")
    assert headed.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # its length changes
        assert headed.headers["content-length"] == str(len(got.content))


async def test_head_has_its_own_metric_and_is_allowed_where_get_is(api: Any, scripted: ScriptedEngine) -> None:
    scripted.checks["store"] = CheckResult(False, "away")
    assert (await api.head("/health/ready")).status_code == 503
    metrics = (await api.get("/metrics")).text
    assert 'metaban_request_seconds_count{method="HEAD",route="/health/ready",status="503"} 1.0' in metrics
    assert (await api.post("/health/ready")).headers["allow"] == "GET, HEAD"
    refused = await api.head("/recommend")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")


async def test_head_over_a_real_socket(scripted: ScriptedEngine) -> None:
    """A body after the headers would be read as the next answer."""
    app = create_app(Settings(), OneEngine(scripted))  # type: ignore[arg-type]
    async with serving(LimitedProtocol, app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"HEAD /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"content-length: " in head
        writer.close()
