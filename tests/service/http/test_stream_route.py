"""GET /admin/stream: waiting and learned rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from metaban.service.http.auth import FreshKey
from tests.own_valkey import own_valkey
from tests.service.apps import SHOP_ARMS as ARMS
from tests.service.apps import served, teach
from tests.service.engines import worker_running
from tests.worker.workshop import soon


async def test_counts_from_waiting_to_learned(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client:
        for number in range(6):
            body = {"user_id": f"u{number}", "arms": ARMS, "decision_id": f"d{number}"}
            assert (await client.post("/recommend", json=body)).status_code == 200
            told = await client.post("/feedback", json={"decision_id": f"d{number}", "reward": 1})
            assert told.status_code == 202
        before = (await client.get("/admin/stream")).json()
        assert [each["partition"] for each in before["partitions"]] == [0, 1]
        assert before["totals"]["waiting"] == sum(each["waiting"] for each in before["partitions"]) == 6
        assert before["totals"]["oldest_age_ms"] == max(
            each["oldest_age_ms"] for each in before["partitions"] if each["waiting"]
        )
        assert before["totals"]["counters"]["enqueued"] == 6
        assert before["totals"]["unowned"] == 2
        async with worker_running(valkey_url):
            await teach(client, "u0", [1])

            async def learned() -> bool:
                now: dict[str, Any] = (await client.get("/admin/stream")).json()["totals"]
                return now["counters"]["applied"] == 7 and now["waiting"] == 0 and now["oldest_age_ms"] is None

            await soon(learned)
            after = (await client.get("/admin/stream")).json()
            assert after["totals"]["unowned"] == 0
            assert {each["consumers"] for each in after["partitions"]} == {1}
            assert all(each["owner"] for each in after["partitions"])


async def test_stream_during_an_outage(tmp_path: Path) -> None:
    with own_valkey() as valkey:
        async with served(valkey.url, tmp_path) as client:
            assert (await client.get("/admin/stream")).status_code == 200
            valkey.kill()
            away = await client.get("/admin/stream")
            assert (away.status_code, away.json()["type"]) == (503, "/problems/unavailable")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/stream"),
        ("GET", "/admin/calibration"),
        ("GET", "/admin/jobs"),
        ("GET", "/admin/jobs/x"),
        ("GET", "/admin/groups?user_id=u&arm_id=a"),
        ("POST", "/admin/groups"),
    ],
)
async def test_requires_an_admin_key(redis: Redis, valkey_url: str, tmp_path: Path, method: str, path: str) -> None:
    client_key, admin_key = FreshKey.generate(), FreshKey.generate()
    keys = {"client_keys": {client_key.digest}, "admin_keys": {admin_key.digest}}
    async with served(valkey_url, tmp_path, **keys) as client:
        statuses = []
        for key in (None, client_key.key, admin_key.key):
            headers = {} if key is None else {"X-API-Key": key}
            statuses.append((await client.request(method, path, headers=headers)).status_code)
        assert statuses[:2] == [401, 403]
        assert statuses[2] in (200, 404, 415)
        refused = await client.post("/recommend/batch", json={"requests": [{}]})
        assert refused.status_code == 401


async def test_all_fields_are_described(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client:
        described = (await client.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    for method, path, body in (
        ("post", "/recommend/batch", "RecommendBatch"),
        ("post", "/admin/groups", "GroupRequest"),
        ("get", "/admin/groups", None),
        ("get", "/admin/stream", None),
        ("get", "/admin/calibration", None),
        ("get", "/admin/jobs", None),
    ):
        route = described["paths"][path][method]
        assert route["summary"]
        assert route["description"]
        if body is not None:
            [content] = route["requestBody"]["content"].values()
            assert content["schema"]["$ref"].endswith(f"/{body}")
            assert body in schemas
    text = str(described)
    for name in schemas:
        assert f"/schemas/{name}'" in text or name in ("HTTPValidationError", "ValidationError"), name
    assert schemas["RecommendBatch"]["properties"]["requests"]["items"]["$ref"].endswith("/RecommendRequest")
    assert "explanation" in schemas["ItemOut"]["properties"]
