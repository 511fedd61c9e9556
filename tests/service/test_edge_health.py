"""Health, readiness and metrics, as the edge tells them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from edge_engine import EdgeEngine, Lone, edge

from service.app import create_app
from service.contracts import CheckResult, FeedbackOutcome, Rejection
from service.edge import edge_in
from service.protocol import BoundedProtocol
from service.settings import Settings
from store.errors import StoreUnavailable
from tests.service.test_edge_requests import ASK, ONE, client, engine
from tests.service.test_protocol import serving

__all__ = ["client", "engine"]


async def test_health(client: Any, engine: EdgeEngine) -> None:
    assert (await client.get("/health/live")).json()["status"] == "live"
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()["status"]) == (200, "ready")
    engine.checks["replica"] = CheckResult(False, "is behind")
    response = await client.get("/health/ready")
    assert response.status_code == 503
    assert response.json() == {
        "status": "not ready",
        "checks": {"store": {"ok": True, "detail": "answers"}, "replica": {"ok": False, "detail": "is behind"}},
    }


async def test_degraded_is_well_enough_for_traffic(client: Any, engine: EdgeEngine) -> None:
    engine.checks["store"] = CheckResult(False, "away", vital=False)
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()) == (
        200,
        {"status": "degraded", "checks": {"store": {"ok": False, "detail": "away"}}},
    )
    engine.checks["replica"] = CheckResult(False, "is behind")
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()["status"]) == (503, "not ready")


async def test_about_to_stop(engine: EdgeEngine) -> None:
    app = create_app(Settings(), Lone(engine))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
        assert (await client.get("/health/ready")).status_code == 200
        edge_in(app).stopping.set()
        response = await client.get("/health/ready")
        assert (response.status_code, response.json()["status"]) == (503, "not ready")
        assert not response.json()["checks"]["service"]["ok"]
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.post("/recommend", json=ASK)).status_code == 200


async def test_a_decision_that_was_not_recorded(client: Any, engine: EdgeEngine) -> None:
    engine.logged = False
    assert (await client.post("/recommend", json=ASK)).json()["logged"] is False
    lines = (await client.get("/metrics")).text.splitlines()
    assert 'metaban_unlogged_decisions_total{namespace="default"} 1.0' in lines
    assert 'metaban_decisions_total{cold_start="meta",namespace="default",policy="ucb-floor"} 1.0' in lines


async def test_metrics(client: Any, engine: EdgeEngine) -> None:
    await client.post("/recommend", json=ASK)
    engine.outcome = FeedbackOutcome(2, 1, (Rejection(3, "unknown-decision", ""),), None)
    await client.post("/feedback", json={"events": [ONE] * 4})
    await client.get("/made-up/by/a/client")
    for path in ("/docs", "/openapi.json"):
        await client.get(path)
    engine.error = StoreUnavailable("gone")
    response = await client.get("/metrics")
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


async def test_two_apps_do_not_share_metrics(client: Any, engine: EdgeEngine) -> None:
    await client.post("/recommend", json=ASK)
    async with edge(EdgeEngine()) as other:
        assert "metaban_decisions_total{" not in (await other.get("/metrics")).text


async def test_the_engine_lives_as_long_as_the_app() -> None:
    engine = EdgeEngine()
    async with edge(engine):
        assert engine.running
    assert not engine.running


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json", "/nowhere"])
async def test_head_is_get_without_the_body(client: Any, path: str) -> None:
    got, headed = await client.get(path), await client.head(path)
    assert (headed.status_code, headed.content) == (got.status_code, b"")
    assert headed.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # which grows
        assert headed.headers["content-length"] == str(len(got.content))


async def test_head_is_counted_as_what_it_is_and_allowed_where_get_is(client: Any, engine: EdgeEngine) -> None:
    engine.checks["store"] = CheckResult(False, "away")
    assert (await client.head("/health/ready")).status_code == 503
    metrics = (await client.get("/metrics")).text
    assert 'metaban_request_seconds_count{method="HEAD",route="/health/ready",status="503"} 1.0' in metrics
    assert (await client.post("/health/ready")).headers["allow"] == "GET, HEAD"
    refused = await client.head("/recommend")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")


async def test_head_over_a_real_socket(engine: EdgeEngine) -> None:
    """What comes after the head of the answer would be taken for the next one."""
    app = create_app(Settings(), Lone(engine))  # type: ignore[arg-type]
    async with serving(BoundedProtocol, app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"HEAD /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"content-length: " in head
        writer.close()
