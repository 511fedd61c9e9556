"""Several namespaces in one deployment are separate, and a key opens only its own."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis

from metaban.service.http.auth import FreshKey
from tests.service.apps import ARMS, running_app
from tests.service.engines import worker_running
from tests.valkeys import Valkey, running
from tests.worker.workshop import soon

pytestmark = pytest.mark.usefixtures("short_tails")

#: Public paths, independent of namespaces.
OPEN = {"/health/live", "/health/ready"}
ASK = {"user_id": "u", "arms": ARMS}


async def create(http: httpx.AsyncClient, **fields: object) -> dict[str, object]:
    answer = await http.post("/admin/namespaces", json=fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_creation_and_deletion(http: httpx.AsyncClient, redis: Redis) -> None:
    made = await create(http, name="shop", arm_features=2, context_features=1, partitions=3, preset="default")
    assert (made["dimension"], made["partitions"], made["preset"]) == (4, 3, "default")
    assert (await http.get("/admin/namespaces/shop")).json() == made
    names = [entry["name"] for entry in (await http.get("/admin/namespaces")).json()["namespaces"]]
    assert names == ["default", "shop"]
    ask = {"user_id": "u", "arms": [{"id": "a", "features": [1, 2]}], "context": [3]}
    assert (await http.post("/recommend?namespace=shop", json=ask)).status_code == 200
    wrong = await http.post("/recommend?namespace=shop", json={**ask, "context": [3, 4]})
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "context")
    assert (await http.delete("/admin/namespaces/shop")).json() == {"name": "shop", "deleted": True}
    assert (await http.post("/recommend?namespace=shop", json=ask)).status_code == 404
    left = [key async for key in redis.scan_iter("*{shop:*")]
    assert left == [b"metaban:{shop:meta}:namespace"]
    assert [entry["name"] for entry in (await http.get("/admin/namespaces")).json()["namespaces"]] == ["default"]


async def test_namespaces_are_separate(http: httpx.AsyncClient, valkey_url: str) -> None:
    await create(http, name="shop")
    first = await http.post("/recommend", json={**ASK, "decision_id": "d"})
    wide = {"user_id": "u", "arms": [{"id": "x", "features": [1.0] * 7}], "decision_id": "d"}
    second = await http.post("/recommend?namespace=shop", json=wide)
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.json()["items"][0]["arm_id"] == "x"
    async with worker_running(valkey_url):
        told = await http.post("/feedback?wait=applied&namespace=shop", json={"decision_id": "d", "reward": 1})
        assert told.json()["applied"] is True
        assert (await http.get("/admin/users/u?namespace=shop")).json()["version"] == 1
        assert (await http.get("/admin/users/u")).json()["version"] == 0
        told = await http.post("/feedback?wait=applied", json={"decision_id": "d", "reward": 1})
        assert told.json()["applied"] is True
        assert (await http.get("/admin/users/u")).json()["version"] == 1


async def test_creation_and_deletion_by_another_process(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (_, there):
        await create(there, name="shop")
        assert (await here.post("/recommend?namespace=shop", json=ASK)).status_code == 200
        await there.delete("/admin/namespaces/shop")

        async def gone() -> bool:
            return (await here.post("/recommend?namespace=shop", json=ASK)).status_code == 404

        await soon(gone)
        await create(there, name="shop", arm_features=1)
        answer = await here.post(
            "/recommend?namespace=shop", json={"user_id": "u", "arms": [{"id": "a", "features": [1]}]}
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "Shop"}, "name"),
        ({"name": "a" * 41}, "name"),
        ({"name": "shop", "preset": "other"}, "preset"),
        ({"name": "shop", "partitions": 0}, "partitions"),
        ({"name": "shop", "partitions": 10_000}, "partitions"),
        ({"name": "shop", "context_features": 3}, "context_features"),
        ({"name": "shop", "arm_features": 5_000}, "arm_features"),
        ({"name": "shop", "alpha": 1}, "alpha"),
        ({"name": "shop", "learner": {"nonsense": 1}}, "learner"),
    ],
)
async def test_invalid_namespaces_are_refused(http: httpx.AsyncClient, body: dict[str, object], field: str) -> None:
    answer = await http.post("/admin/namespaces", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert len((await http.get("/admin/namespaces")).json()["namespaces"]) == 1


async def test_deleted_default_namespace_is_recreated_in_every_process(redis: Redis, valkey_url: str) -> None:
    """Deleting the default namespace undoes a first request with the wrong features."""
    right = {"user_id": "u", "arms": [{"id": "a", "features": [1, 2]}]}
    async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (_, there):
        for client in (here, there):
            assert (await client.post("/recommend", json=ASK)).status_code == 200
            assert (await client.post("/recommend", json=right)).status_code == 422
        assert (await here.delete("/admin/namespaces/default")).json() == {"name": "default", "deleted": True}
        assert (await here.post("/recommend", json=right)).status_code == 200

        async def served() -> bool:
            return (await there.post("/recommend", json=right)).status_code == 200

        await soon(served)


async def test_existing_name_is_refused(http: httpx.AsyncClient) -> None:
    await create(http, name="shop")
    again = await http.post("/admin/namespaces", json={"name": "shop"})
    assert (again.status_code, again.json()["type"]) == (409, "/problems/namespace-exists")
    assert (await http.delete("/admin/namespaces/nobody")).status_code == 404


def calls_of(app: FastAPI) -> list[tuple[str, str]]:
    """All operations of the OpenAPI document, with values for path parameters."""
    known = {"snapshot_id": "20260301T060000Z-ab12cd", "letter_id": "1-1", "partition": "0"}
    calls = []
    for path, operations in app.openapi()["paths"].items():
        filled = re.sub(r"{(\w+)}", lambda match: known.get(match[1], "x"), path)
        calls += [(method.upper(), filled) for method in operations]
    return calls


def test_openapi_has_all_routes() -> None:
    from metaban.service.http.app import ROUTERS

    hidden = [route.path for router in ROUTERS for route in router.routes if not route.include_in_schema]  # type: ignore[attr-defined]
    assert hidden == []


async def test_key_of_one_namespace_is_refused_in_another(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked for all routes of the OpenAPI document."""
    monkeypatch.setattr("metaban.service.http.admission.UNKNOWN_KEYS_BURST", 10_000)  # no refusal by the rate limit
    shop_client, shop_admin, admin = FreshKey.generate(), FreshKey.generate(), FreshKey.generate()
    keys = {"client_keys": {f"shop:{shop_client.digest}"}, "admin_keys": {f"shop:{shop_admin.digest}", admin.digest}}
    async with running_app(valkey_url, **keys) as (app, http):
        for name in ("shop", "other"):
            made = await http.post("/admin/namespaces", json={"name": name}, headers={"X-API-Key": admin.key})
            assert made.status_code == 201
        calls = [call for call in calls_of(app) if call[1] not in OPEN]
        assert len(calls) > 15
        for method, path in calls:
            for target in ("", "?namespace=default", "?namespace=other", "?namespace=unknown"):
                for key in (shop_client, shop_admin):
                    answer = await http.request(method, path + target, headers={"X-API-Key": key.key}, json={})
                    assert answer.status_code in {403, 404}, (method, path, target, answer.text)
                    assert "other" not in answer.text
            answer = await http.request(method, path + "?namespace=other", json={})
            assert answer.status_code == 401, (method, path)
        own = await http.post("/recommend?namespace=shop", json=ASK, headers={"X-API-Key": shop_client.key})
        assert own.status_code == 200
        seen = await http.get("/admin/config?namespace=shop", headers={"X-API-Key": shop_admin.key})
        assert seen.status_code == 200
        refused = await http.get("/admin/config?namespace=shop", headers={"X-API-Key": shop_client.key})
        assert refused.status_code == 403


async def test_snapshots_of_another_namespace_are_neither_seen_nor_restored(
    redis: Redis, valkey_url: str, tmp_path: object
) -> None:
    async with running_app(valkey_url, data_dir=tmp_path) as (_, http), worker_running(valkey_url):
        await create(http, name="shop")
        await http.post("/recommend", json={**ASK, "decision_id": "d"})
        assert (await http.post("/feedback?wait=applied", json={"decision_id": "d", "reward": 1})).json()["applied"]
        job = {"state": "failed", "id": ""}

        async def taken() -> bool:
            nonlocal job
            if job["state"] == "failed":  # until the worker has published its first epoch
                job = (await http.post("/admin/snapshots")).json()
            job = (await http.get(f"/admin/jobs/{job['id']}")).json()
            return job["state"] == "done"

        await soon(taken)
        [snapshot] = (await http.get("/admin/snapshots")).json()["snapshots"]
        assert (await http.get("/admin/snapshots?namespace=shop")).json()["snapshots"] == []
        assert (await http.post(f"/admin/snapshots/{snapshot['id']}/restore?namespace=shop")).status_code == 404
        assert (await http.get(f"/admin/jobs/{job['id']}?namespace=shop")).status_code == 404


@pytest.mark.parametrize(
    ("path", "parameter"),
    [("/recommend?namespac=shop", "namespac"), ("/feedback?wait=applied&wiat=applied", "wiat")],
)
async def test_unknown_parameters_are_refused(http: httpx.AsyncClient, path: str, parameter: str) -> None:
    answer = await http.post(path, json=ASK)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, parameter)
    assert "the parameters are" in answer.json()["detail"]
    assert "namespace" in answer.json()["detail"]


async def test_emptied_store_is_no_deletion(redis: Redis, valkey_url: str) -> None:
    """A namespace answers as in an outage, until it is created or restored."""
    async with running_app(valkey_url) as (app, http):
        await http.post("/admin/namespaces", json={"name": "shop"})
        first = await http.post("/recommend?namespace=shop", json=ASK)
        await redis.flushall()
        engine = app.state.metaban.recommenders.engines["shop"]

        async def noticed() -> bool:
            return bool(engine.lost)

        await soon(noticed)
        for _ in range(3):
            answer = await http.post("/recommend?namespace=shop", json=ASK)
            assert (answer.status_code, answer.json()["logged"]) == (200, False)
        reward = {"decision_id": first.json()["decision_id"], "reward": 1}
        assert (await http.post("/feedback?namespace=shop", json=reward)).status_code == 503
        assert (await http.get("/health/ready")).status_code == 503
        assert (await http.post("/admin/namespaces", json={"name": "shop"})).status_code == 201
        again = await http.post("/recommend?namespace=shop", json=ASK)
        assert (again.status_code, again.json()["logged"]) == (200, True)


async def test_outage_is_not_vital_while_a_used_namespace_answers(tmp_path: Path) -> None:
    """Though the default namespace was never used."""
    server = Valkey(tmp_path)
    with running(server):
        async with running_app(server.url) as (_, http):
            await http.post("/admin/namespaces", json={"name": "shop"})
            server.pause()
            assert (await http.get("/health/ready")).status_code == 503  # no namespace can answer
            server.resume()

            async def becomes(status: str) -> None:
                async def ready() -> bool:
                    answer = await http.get("/health/ready")
                    return (answer.status_code, answer.json()["status"]) == (200, status)

                await soon(ready, status)

            await becomes("ready")
            await http.post("/recommend?namespace=shop", json=ASK)
            server.pause()
            try:
                await becomes("degraded")
                served = await http.post("/recommend?namespace=shop", json=ASK)
                assert (served.status_code, served.json()["logged"]) == (200, False)
            finally:
                server.resume()
