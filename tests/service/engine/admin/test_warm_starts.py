"""/admin/fusion: the served fusion model, and training jobs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from metaban.client import AsyncMetaban
from metaban.models.fusion.warm_starts import GuardReport
from metaban.service.engine.admin.warm_starts import guard_summary
from metaban.store.keys import NamespaceKeys
from metaban.store.shared.fusion import FusionJobRecord
from tests.service.apps import ARMS, PAPER, running_app
from tests.service.engine.fusion_models import fusion_store, publish, trained
from tests.worker.workshop import soon

KEYS = NamespaceKeys("default", 2)
IDLE = {
    "state": "idle", "progress": 0.0, "doing": "", "by": None,
    "requested_ms": None, "started_ms": None, "finished_ms": None, "reason": None,
}  # fmt: skip
NONE = {
    "available": True, "setting": "auto", "version": None, "served": None, "trained_ms": None, "sources": None,
    "profile_size": None, "guard": None, "job": IDLE,
}  # fmt: skip


@pytest.fixture
async def http(redis: Redis, valkey_url: str, short_tails: None) -> Any:
    async with running_app(valkey_url) as (_, client):
        yield client


async def shown(http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await http.get("/admin/fusion")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_without_a_fusion_model(http: httpx.AsyncClient) -> None:
    assert await shown(http) == NONE
    await http.post("/recommend", json={"user_id": "u", "arms": ARMS, "user_features": [1, 2]})
    assert await shown(http) == NONE | {"profile_size": 2}


async def test_training_request(http: httpx.AsyncClient, redis: Redis) -> None:
    """Repeated requests make one job in the store, for any worker, with one audit entry."""
    first = await http.post("/admin/fusion")
    assert first.status_code == 202
    asked = first.json()
    assert asked == IDLE | {"state": "queued", "by": "request", "requested_ms": asked["requested_ms"]}
    assert asked["requested_ms"] > 1_600_000_000_000
    assert (await http.post("/admin/fusion")).json() == asked
    assert (await shown(http))["job"] == asked
    lines = (await http.get("/admin/audit")).json()["lines"]
    assert [line["action"] for line in lines] == ["POST /admin/fusion"] * 2
    store = await fusion_store(redis)
    assert await store.acquire_lease("worker", 60_000)
    running = FusionJobRecord(
        "running", asked["requested_ms"], asked["requested_ms"] + 5, 0, 0.25, "training", "", "request"
    )
    assert await store.put_job(running, lease_token="worker")
    under_way = (await http.post("/admin/fusion")).json()
    assert under_way == asked | {
        "state": "running", "progress": 0.25, "doing": "training", "started_ms": asked["requested_ms"] + 5,
    }  # fmt: skip
    failed = FusionJobRecord("failed", 1, 2, 3, 0.5, "", "too few users", "growth")
    assert await store.put_job(failed, lease_token="worker")
    assert (await shown(http))["job"] == {
        "state": "failed", "progress": 0.5, "doing": "", "by": "growth",
        "requested_ms": 1, "started_ms": 2, "finished_ms": 3, "reason": "too few users",
    }  # fmt: skip
    again = (await http.post("/admin/fusion")).json()
    assert (again["state"], again["reason"], again["progress"]) == ("queued", None, 0.0)


async def test_status_of_a_fusion_model(http: httpx.AsyncClient, redis: Redis) -> None:
    await publish(redis)
    found = await shown(http)
    report = trained().report
    assert (found["version"], found["trained_ms"], found["sources"]) == (1, 1_001, len(trained().profiles))
    assert {name: found["guard"][name] for name in report} == pytest.approx(report)
    await redis.hset(KEYS.fusion, "report", '{"verdict": "prior"}')
    assert (await shown(http))["guard"] is None, "a report of another version of metaban"
    await redis.hset(KEYS.fusion_job, "state", "dancing")
    assert (await shown(http))["job"]["state"] == "idle"


@pytest.mark.parametrize(
    ("verdict", "gain", "words"),
    [
        ("fusion", 1.234, ["12 held-out users", "1.23 ± 0.1 nats", "better", "begin from their warm start"]),
        ("blend", 0.5, ["0.5 ± 0.1 nats", "better", "between the prior and their warm start"]),
        ("prior", 0.05, ["0.05 ± 0.1 nats", "better", "all new users begin from the prior"]),
        ("prior", -0.3, ["0.3 ± 0.1 nats", "worse", "all new users begin from the prior"]),
    ],
)
def test_guard_summary(verdict: Any, gain: float, words: list[str]) -> None:
    said = guard_summary(GuardReport(verdict, 1.0, 0.5, 12, 100, 3.0, 3.0 - gain, gain, 0.1))
    for part in words:
        assert part in said


async def test_preset_without_warm_starts(redis: Redis, valkey_url: str, short_tails: None) -> None:
    async with running_app(valkey_url, **PAPER) as (_, http):
        assert await shown(http) == NONE | {"available": False}
        refused = await http.post("/admin/fusion")
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/fusion-unavailable")
        assert "preset" in refused.json()["detail"]
        assert (await shown(http))["job"] == IDLE
        made = {"name": "shop", "preset": "default"}
        assert (await http.post("/admin/namespaces", json=made)).status_code == 201
        assert (await http.post("/admin/fusion?namespace=shop")).status_code == 202
        assert (await http.get("/admin/fusion?namespace=shop")).json()["job"]["state"] == "queued"
        assert (await shown(http))["job"] == IDLE


async def test_switched_off(http: httpx.AsyncClient) -> None:
    await http.patch("/admin/config", json={"fusion": "off"})
    assert await shown(http) == NONE | {"setting": "off"}
    refused = await http.post("/admin/fusion")
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/fusion-unavailable")
    assert "PATCH /admin/config" in refused.json()["detail"]
    for wrong in ("on", True, 1, ["auto"]):
        answer = await http.patch("/admin/config", json={"fusion": wrong})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "fusion")


async def test_fusion_through_the_client(http: httpx.AsyncClient, redis: Redis) -> None:
    await http.post("/recommend", json={"user_id": "somebody", "arms": [{"id": "a", "features": [1, 2, 3]}]})
    await publish(redis)
    async with AsyncMetaban("http://localhost", transport=http._transport) as metaban:
        found = await metaban.admin.fusion()
        assert (found.version, found.available, found.job.state) == (1, True, "idle")
        assert found.guard is not None
        assert found.guard.verdict == "fusion"
        assert (await metaban.admin.train_fusion()).state == "queued"

        async def is_served() -> bool:
            return (await metaban.admin.fusion()).served == 1

        await soon(is_served)
        decision = await metaban.recommend("ann", {"a": [1, 2, 3], "b": [3, 2, 1]}, user_features=[0.5, 1])
        assert decision.cold_start == "fusion"
        user = await metaban.admin.user("ann")
        assert user.cold_start == "fusion"
        assert user.warm_start is not None
        assert (user.warm_start.fusion_version, len(user.warm_start.nearest)) == (1, 5)
        assert user.warm_start.nearest[0].user_id is not None
