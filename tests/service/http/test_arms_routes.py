"""/admin/arms over HTTP, one arm at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from redis.asyncio import Redis

from metaban.service.http.auth import FreshKey
from tests.own_valkey import own_valkey
from tests.service.apps import served
from tests.service.http.arm_calls import NDJSON, line, listed, put, small_catalogue
from tests.service.scripted_engine import ScriptedEngine, scripted_app

ODD_IDS = ["a/b", "Zoë 🙂", "a b", "%41", "..", "?x=1#y", "{}", "/", "import"]


@pytest.fixture
async def client(redis: Redis, valkey_url: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with small_catalogue(valkey_url, tmp_path) as client:
        yield client


class TestOneArm:
    async def test_create_read_change_and_delete(self, client: httpx.AsyncClient) -> None:
        features = {"price": 2, "kind": "tea", "vegan": True}
        created = await client.post("/admin/arms", json={"id": "tea", "features": features})
        assert (created.status_code, created.headers["etag"]) == (201, '"1"')
        arm = created.json()
        assert (arm["id"], arm["features"], arm["version"]) == ("tea", features, 1)
        assert arm["features"]["vegan"] is True
        taken = await client.post("/admin/arms", json={"id": "tea", "features": features})
        assert (taken.status_code, taken.json()["type"]) == (409, "/problems/arm-exists")
        assert (await client.get("/admin/arms/tea")).json() == arm
        same = await put(client, "tea", features)
        assert (same.status_code, same.json()) == (200, arm)
        changed = await put(client, "tea", {"price": 3})
        assert (changed.status_code, changed.json()["version"], changed.headers["etag"]) == (200, 2, '"2"')
        removed = await client.delete("/admin/arms/tea")
        assert (removed.status_code, removed.json()) == (200, {"id": "tea", "version": 3})
        for gone in (await client.delete("/admin/arms/tea"), await client.get("/admin/arms/tea")):
            assert (gone.status_code, gone.json()["type"]) == (404, "/problems/not-found")
        anew = await put(client, "tea", {"price": 3})
        assert (anew.status_code, anew.json()["version"]) == (201, 4)

    @pytest.mark.parametrize("how", ["parameter", "header", "tag"])
    async def test_versions_are_compared(self, client: httpx.AsyncClient, how: str) -> None:
        def expecting(version: int) -> dict[str, Any]:
            if how == "parameter":
                return {"params": {"version": version}}
            return {"headers": {"If-Match": f'"{version}"' if how == "tag" else str(version)}}

        path, body = "/admin/arms/a", {"features": [1]}
        for version, status in ((1, 409), (0, 201), (0, 409), (2, 409)):
            answer = await client.put(path, json=body, **expecting(version))
            assert answer.status_code == status
            if status == 409:
                assert answer.json()["type"] == "/problems/version-conflict"
        assert (await client.put(path, json={"features": [2]}, **expecting(1))).json()["version"] == 2
        assert (await client.delete(path, **expecting(1))).status_code == 409
        assert (await client.delete(path, **expecting(2))).json()["version"] == 3

    async def test_invalid_versions_are_refused(self, client: httpx.AsyncClient) -> None:
        for tag in ("*", "x", "-1", 'W/"1"', "1" * 40, '"1", "2"'):
            answer = await client.put("/admin/arms/a", json={"features": [1]}, headers={"If-Match": tag})
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "If-Match")
        for version in ("x", "-1", "9" * 40):
            answer = await put(client, "a", [1], version=version)
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "version")
        both = await client.put("/admin/arms/a?version=1", json={"features": [1]}, headers={"If-Match": "2"})
        assert both.status_code == 422
        assert await listed(client) == {}

    async def test_existing_arm_is_not_replaced_by_a_creation(self, client: httpx.AsyncClient) -> None:
        def sent(features: list[int], none: str = "*", **headers: str) -> dict[str, Any]:
            return {"json": {"features": features}, "headers": {"If-None-Match": none, **headers}}

        assert (await client.put("/admin/arms/a", **sent([1]))).status_code == 201
        for features in ([1], [2]):
            there = await client.put("/admin/arms/a", **sent(features))
            assert (there.status_code, there.json()["type"]) == (412, "/problems/precondition-failed")
        assert (await client.put("/admin/arms/a?version=0", **sent([2]))).status_code == 412
        for wrong in (sent([2], '"1"'), sent([2], "x"), sent([2], **{"If-Match": '"1"'})):
            answer = await client.put("/admin/arms/a", **wrong)
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "If-None-Match")
        assert await listed(client) == {"a": [1]}
        assert (await client.delete("/admin/arms/a")).status_code == 200
        assert (await client.put("/admin/arms/a", **sent([2]))).status_code == 201

    async def test_ids_with_any_characters(self, client: httpx.AsyncClient) -> None:
        for arm in ODD_IDS:
            made = await client.post("/admin/arms", json={"id": arm, "features": [1, 2]})
            assert made.status_code == 201, made.text
            # The client would resolve a relative path.
            path = "/admin/arms/" + quote(arm, safe="").replace(".", "%2E")
            url = httpx.URL("http://localhost").copy_with(raw_path=path.encode())
            assert (await client.get(url)).json()["id"] == arm
            assert (await client.put(url, json={"features": [3, 4]})).json()["version"] == 2
        assert await listed(client) == {arm: [3, 4] for arm in ODD_IDS}
        for arm in ODD_IDS:
            path = "/admin/arms/" + quote(arm, safe="").replace(".", "%2E")
            assert (
                await client.delete(httpx.URL("http://localhost").copy_with(raw_path=path.encode()))
            ).status_code == 200
        assert await listed(client) == {}

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"id": "a"}, "features"),
            ({"features": [1]}, "id"),
            ({"id": "a", "features": [1], "version": 3}, "version"),
            ({"id": "", "features": [1]}, "id"),
            ({"id": "a\n", "features": [1]}, "id"),
            ({"id": "a" * 257, "features": [1]}, "id"),
            ({"id": "a", "features": [1.0] * 9}, "features"),
            ({"id": "a", "features": []}, "features"),
            ({"id": "a", "features": [1, 1e31]}, "features[1]"),
            ({"id": "a", "features": {"x": None}}, "features.x"),
            ([], ""),
        ],
    )
    async def test_invalid_arms_are_refused(self, client: httpx.AsyncClient, body: Any, field: str) -> None:
        answer = await client.post("/admin/arms", json=body)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
        assert await listed(client) == {}

    async def test_invalid_paths_and_bodies_are_refused(self, client: httpx.AsyncClient) -> None:
        assert (await put(client, "a" * 257, [1])).status_code == 422
        assert (await client.put("/admin/arms/", json={"features": [1]})).status_code == 422
        assert (await client.put("/admin/arms/a", json={"id": "a", "features": [1]})).status_code == 422
        assert (await client.put("/admin/arms/a", content=b"{")).status_code == 415
        assert (await put(client, "a", ["x" * 3_000])).status_code == 413
        for query in ("limit=0", "limit=201", "cursor=", "cursor=" + "x" * 300):
            assert (await client.get(f"/admin/arms?{query}")).status_code == 422

    async def test_full_catalogue_is_refused(self, client: httpx.AsyncClient) -> None:
        for number in range(20):
            assert (await put(client, str(number), [1])).status_code == 201
        for full in (
            await put(client, "one more", [1]),
            await client.post("/admin/arms", json={"id": "x", "features": [1]}),
        ):
            assert (full.status_code, full.json()["type"]) == (409, "/problems/catalogue-full")
        assert (await put(client, "7", [2])).status_code == 200
        assert (await client.delete("/admin/arms/7")).status_code == 200
        assert (await put(client, "one more", [1])).status_code == 201

    async def test_arm_that_does_not_fit_the_layout_is_refused(self, client: httpx.AsyncClient) -> None:
        arms = [{"id": "a", "features": [1, 2, 3]}]
        assert (await client.post("/recommend", json={"user_id": "u", "arms": arms})).status_code == 200
        refused = await put(client, "a", [1, 2])
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "features")
        assert "takes 3 numbers, not 2" in refused.json()["detail"]


class TestRecommending:
    async def test_recommendations_from_the_catalogue(self, client: httpx.AsyncClient) -> None:
        empty = await client.post("/recommend", json={"user_id": "u"})
        assert (empty.status_code, empty.json()["errors"][0]["field"]) == (422, "arms")
        for arm in "abc":
            await put(client, arm, [ord(arm) - 97, 1])
        body = {"user_id": "u", "k": 5, "exclude": ["b", "zzz"], "decision_id": "d"}
        answer = await client.post("/recommend", json=body)
        assert answer.status_code == 200
        items = answer.json()["items"]
        assert {item["arm_id"] for item in items} == {"a", "c"}
        await client.delete("/admin/arms/a")
        assert (await client.post("/recommend", json=body)).json()["items"] == items
        assert (await client.post("/recommend", json={**body, "exclude": ["zzz", "b"]})).status_code == 409
        unknown = await client.post("/recommend", json={"user_id": "u", "arm_ids": ["c", "a"]})
        assert (unknown.status_code, unknown.json()["errors"][0]["field"]) == (422, "arm_ids[1]")
        none = await client.post("/recommend", json={"user_id": "u", "arm_ids": ["c"], "exclude": ["c"]})
        assert (none.status_code, none.json()["errors"][0]["field"]) == (422, "exclude")
        rewarded = await client.post("/feedback", json={"decision_id": "d", "arm_id": "a", "reward": 1})
        assert rewarded.json()["accepted"] == 1


async def test_arms_during_an_outage(tmp_path: Path) -> None:
    with own_valkey() as valkey:
        async with served(valkey.url, tmp_path) as client:
            await put(client, "a", [1, 2])
            valkey.kill()
            for answer in (
                await put(client, "b", [1, 2]),
                await client.get("/admin/arms"),
                await client.get("/admin/arms/a"),
                await client.delete("/admin/arms/a"),
                await client.get("/admin/arms/export"),
                await client.post("/admin/arms/import", content=line("b"), headers=NDJSON),
            ):
                assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")


CALLS = [
    ("GET", "/admin/arms"),
    ("POST", "/admin/arms"),
    ("GET", "/admin/arms/a"),
    ("PUT", "/admin/arms/a"),
    ("DELETE", "/admin/arms/a"),
    ("POST", "/admin/arms/import"),
    ("GET", "/admin/arms/export"),
]


async def test_requires_an_admin_key() -> None:
    client_key, admin_key = FreshKey.generate(), FreshKey.generate()
    async with scripted_app(ScriptedEngine(), client_keys={client_key.digest}, admin_keys={admin_key.digest}) as client:
        for method, path in CALLS:
            assert (await client.request(method, path)).status_code == 401
            refused = await client.request(method, path, headers={"X-API-Key": client_key.key})
            assert (refused.status_code, refused.json()["type"]) == (403, "/problems/forbidden")


async def test_openapi_of_the_arms_routes() -> None:
    async with scripted_app(ScriptedEngine(), max_arms=77) as client:
        schema = (await client.get("/openapi.json")).json()
    paths = schema["paths"]
    for method, path in CALLS:
        call = paths["/admin/arms/{arm_id}" if path == "/admin/arms/a" else path][method.lower()]
        assert call["summary"]
        assert "application/problem+json" in call["responses"]["503"]["content"]
    assert "application/x-ndjson" in paths["/admin/arms/export"]["get"]["responses"]["200"]["content"]
    assert "application/x-ndjson" in paths["/admin/arms/import"]["post"]["requestBody"]["content"]
    asked = schema["components"]["schemas"]["RecommendRequest"]
    assert "arms" not in asked["required"]
    for name in ("arms", "arm_ids", "exclude"):
        assert asked["properties"][name]["anyOf"][0]["maxItems"] == 77
