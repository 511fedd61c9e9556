"""Snapshots over HTTP: jobs, one at a time, for admins."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from metaban.service.http.auth import FreshKey
from metaban.store.keys import NamespaceKeys
from tests.service.apps import SHOP_ARMS, finished, served, teach
from tests.service.engines import worker_running
from tests.service.scripted_engine import ScriptedEngine, scripted_app
from tests.worker.workshop import soon

SNAPSHOT = "20260301T060000Z-ab12cd"


async def thoughts(client: httpx.AsyncClient, user: str) -> list[tuple[str, float]]:
    asked = (await client.post("/recommend", json={"user_id": user, "arms": SHOP_ARMS, "k": 3})).json()
    return sorted((item["arm_id"], round(item["mean"], 4)) for item in asked["items"])


async def test_restore_in_a_running_service(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client, worker_running(valkey_url):
        await teach(client, "ann", [1, 0, 1, 1])
        await teach(client, "bob", [0, 0, 1])
        known = {user: await thoughts(client, user) for user in ("ann", "bob")}
        job = await finished(client, await client.post("/admin/snapshots", params={"name": "good"}))
        assert (job["kind"], job["state"], job["error"]) == ("snapshot-create", "done", None)
        assert job["progress"] == {"doing": "users", "done": 2, "total": 2}
        assert (job["result"]["users"], job["result"]["events"]) == (2, 7)
        snapshot = job["result"]["snapshot"]
        listed = (await client.get("/admin/snapshots")).json()["snapshots"]
        assert [(entry["id"], entry["name"], entry["users"], entry["intact"]) for entry in listed] == [
            (snapshot, "good", 2, None)
        ]
        assert (await client.get("/admin/snapshots?verify=true")).json()["snapshots"][0]["intact"] is True

        await teach(client, "ann", [0, 0, 0, 0, 0, 0])
        assert await thoughts(client, "ann") != known["ann"]
        job = await finished(client, await client.post(f"/admin/snapshots/{snapshot}/restore"))
        assert (job["kind"], job["state"], job["result"]["users"]) == ("snapshot-restore", "done", 2)

        async def as_before() -> bool:
            return {user: await thoughts(client, user) for user in known} == known

        await soon(as_before)
        ready = (await client.get("/health/ready")).json()
        assert ready["status"] == "ready"
        assert "restore" not in ready["checks"]
        # Learning continues from there.
        await teach(client, "ann", [1, 1])
        keys = NamespaceKeys("shop", 2)
        versions = {user: await redis.hget(keys.versions(keys.partition_of(user)), user) for user in known}
        assert versions == {"ann": b"1:6", "bob": b"1:3"}


async def kept(redis: Redis) -> dict[bytes, bytes]:
    """All keys of the store except the audit log."""
    return {key: await redis.dump(key) async for key in redis.scan_iter() if not key.endswith(b":audit")}


async def test_one_job_at_a_time_and_failed_jobs(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client:
        first = await client.post("/admin/snapshots")
        second = await client.post("/admin/snapshots")
        assert (second.status_code, second.json()["type"]) == (409, "/problems/job-running")
        assert first.json()["id"] in second.json()["detail"]
        job = await finished(client, first)
        assert job["state"] == "failed"
        assert "nothing to keep" in job["error"]
        assert job["finished_ms"] >= job["started_ms"]
        next_job = await finished(client, await client.post("/admin/snapshots"))
        assert (await client.get("/admin/jobs")).json() == {"jobs": [next_job, job]}
        (tmp_path / "snapshots" / f"{SNAPSHOT}.tar").parent.mkdir(exist_ok=True)
        (tmp_path / "snapshots" / f"{SNAPSHOT}.tar").write_bytes(b"not a snapshot")
        before = await kept(redis)
        job = await finished(client, await client.post(f"/admin/snapshots/{SNAPSHOT}/restore"))
        assert "cut short" in job["error"]
        assert await kept(redis) == before
        [entry] = (await client.get("/admin/snapshots")).json()["snapshots"]
        assert (entry["intact"], entry["id"]) == (False, SNAPSHOT)
        assert "cut short" in entry["problem"]


async def test_unknown_snapshots_and_jobs(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client:
        for method, path in (("POST", f"/admin/snapshots/{SNAPSHOT}/restore"), ("GET", "/admin/jobs/nothing")):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")
        for path in (
            "/admin/snapshots/latest/restore",
            "/admin/snapshots/..%2Fx/restore",
            "/admin/snapshots?name=a%20b",
        ):
            assert (await client.post(path)).status_code in {404, 422}
        named = (await client.post("/admin/snapshots/before-release/restore")).json()
        assert named["detail"] == "snapshot_id: must be the id of a snapshot: GET /admin/snapshots lists them"
        for name in ("latest", SNAPSHOT):
            refused = await client.post("/admin/snapshots", params={"name": name})
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "name")
        assert (await client.post("/admin/snapshots?name=a%20b")).json()["type"] == "/problems/invalid-input"
        assert (await client.get("/admin/snapshots")).json() == {"snapshots": []}
    assert os.listdir(tmp_path) == []


async def test_one_verification_at_a_time(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / f"{SNAPSHOT}.tar"
    snapshot.parent.mkdir()
    os.mkfifo(snapshot)  # its reader hangs
    async with served(valkey_url, tmp_path) as client:
        first = asyncio.create_task(client.get("/admin/snapshots?verify=true"))
        await asyncio.sleep(0.1)
        second = await client.get("/admin/snapshots?verify=true")
        assert (second.status_code, second.json()["type"]) == (409, "/problems/job-running")
        await asyncio.to_thread(snapshot.write_bytes, b"")
        assert (await first).json()["snapshots"][0]["intact"] is False
        os.remove(snapshot)
        assert (await client.get("/admin/snapshots?verify=true")).json() == {"snapshots": []}


async def test_requires_an_admin_key() -> None:
    client_key, admin_key = FreshKey.generate(), FreshKey.generate()
    calls = [
        ("POST", "/admin/snapshots"),
        ("GET", "/admin/snapshots"),
        ("POST", f"/admin/snapshots/{SNAPSHOT}/restore"),
        ("GET", "/admin/jobs/x"),
    ]
    async with scripted_app(ScriptedEngine(), client_keys={client_key.digest}, admin_keys={admin_key.digest}) as client:
        for method, path in calls:
            assert (await client.request(method, path)).status_code == 401
            refused = await client.request(method, path, headers={"X-API-Key": client_key.key})
            assert (refused.status_code, refused.json()["type"]) == (403, "/problems/forbidden")


async def test_not_ready_during_an_unfinished_restore(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client:
        keys = NamespaceKeys("shop", 2)
        fields = {"generation": 1, "token": "restore x", "snapshot": SNAPSHOT, "target": 3}
        await redis.hset(keys.restoring, mapping=fields)
        await redis.set(keys.lease, "restore x")
        under_way = await client.get("/health/ready")
        assert (under_way.status_code, under_way.json()["checks"]["restore"]["ok"]) == (200, True)
        await redis.delete(keys.lease)
        unfinished = await client.get("/health/ready")
        assert unfinished.status_code == 503
        assert f"metaban snapshot restore {SNAPSHOT}" in unfinished.json()["checks"]["restore"]["detail"]


async def test_stop_cancels_a_job(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client, worker_running(valkey_url):
        await teach(client, "ann", [1])
        await redis.set(NamespaceKeys("shop", 2).lease, "somebody", px=60_000)
        assert (await client.post("/admin/snapshots")).status_code == 202
        await asyncio.sleep(0.1)
    assert os.listdir(tmp_path / "snapshots") == []


@pytest.mark.parametrize("path", ["/admin/snapshots", "/admin/snapshots/{snapshot_id}/restore"])
async def test_openapi_of_the_snapshot_routes(path: str) -> None:
    async with scripted_app(ScriptedEngine()) as client:
        schema = (await client.get("/openapi.json")).json()
    call = schema["paths"][path]["post"]
    assert "application/problem+json" in call["responses"]["409"]["content"]
    assert call["responses"]["202"]["content"]["application/json"]["schema"]["$ref"].endswith("/JobOut")


async def test_decisions_from_before_a_restore_have_no_effect(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    keys = NamespaceKeys("shop", 2)

    async def stands(user: str) -> bytes | None:
        standing: bytes | None = await redis.hget(keys.versions(keys.partition_of(user)), user)
        return standing

    async with served(valkey_url, tmp_path) as client, worker_running(valkey_url):
        await teach(client, "ann", [1, 0, 1, 1])
        taken = await finished(client, await client.post("/admin/snapshots"))
        snapshot = taken["result"]["snapshot"]
        before = (await client.post("/recommend", json={"user_id": "ann", "arms": SHOP_ARMS})).json()
        await teach(client, "late", [1, 0, 1])
        restored = await finished(client, await client.post(f"/admin/snapshots/{snapshot}/restore"))
        assert restored["result"]["dropped"] == 1

        async def cold() -> bool:
            answer = await client.post("/recommend", json={"user_id": "late", "arms": SHOP_ARMS})
            return bool(answer.json()["cold_start"] == "meta")

        await soon(cold)
        told = await client.post("/feedback", json={"decision_id": before["decision_id"], "reward": 1})
        assert told.status_code == 409, told.text
        await teach(client, "late", [1, 1])
        await teach(client, "ann", [1])
        assert (await stands("late"), await stands("ann")) == (b"1:2", b"1:5")
        # A user forgotten on request is not restored.
        await client.delete("/admin/users/ann")
        again = await finished(client, await client.post(f"/admin/snapshots/{snapshot}/restore"))
        assert (again["result"]["users"], again["result"]["forgotten"]) == (0, 1)
    async with served(valkey_url, tmp_path) as client, worker_running(valkey_url):
        assert (await client.get("/health/ready")).json()["status"] == "ready"
        await teach(client, "late", [1])
        await teach(client, "ann", [1])
