"""Namespaces created and deleted while in use, by several processes, and only partly."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from metaban.store.keys import NAMESPACE_NAMES
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from tests.service.apps import ARMS, PAPER, running_app
from tests.service.engines import worker_running
from tests.worker.workshop import soon

pytestmark = pytest.mark.usefixtures("short_tails")

ASK = {"user_id": "u", "arms": ARMS}


async def create(http: httpx.AsyncClient, **fields: object) -> None:
    answer = await http.post("/admin/namespaces", json=fields)
    assert answer.status_code == 201, answer.text


async def record_of(redis: Redis, name: str = "shop") -> NamespaceRecord:
    record = await NamespaceStore(redis).load(name)
    assert record is not None
    return record


async def left_of(redis: Redis, name: str = "shop") -> list[bytes]:
    return [key async for key in redis.scan_iter(f"metaban:{{{name}:*")]


async def test_deleting_a_namespace_in_use_gives_only_expected_errors(http: httpx.AsyncClient, redis: Redis) -> None:
    for turn in range(4):
        await create(http, name="shop")
        assert (await http.post("/recommend?namespace=shop", json=ASK)).status_code == 200
        statuses: Counter[tuple[str, int]] = Counter()
        deleted = asyncio.Event()

        async def ask(place: int, deleted: asyncio.Event = deleted, statuses: Counter = statuses) -> None:
            while not deleted.is_set():
                body = {**ASK, "user_id": f"u{place}", "explain": place % 2 == 0, "user_features": [1.0]}
                answer = await http.post("/recommend?namespace=shop", json=body)
                statuses["recommend", answer.status_code] += 1
                if answer.status_code == 200 and place % 3 == 0:
                    reward = {"decision_id": answer.json()["decision_id"], "reward": 1}
                    told = await http.post("/feedback?namespace=shop", json=reward)
                    statuses["feedback", told.status_code] += 1

        asking = [asyncio.create_task(ask(place)) for place in range(12)]
        await asyncio.sleep(0.05)
        assert (await http.delete("/admin/namespaces/shop")).status_code == 200
        deleted.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*asking)
        assert {status for _, status in statuses} <= {200, 202, 404, 503}, (turn, statuses)
        # A decision under way may still be stored, until its rewards are late.
        assert not [key for key in await left_of(redis) if b":profile:" in key]


async def test_interrupted_deletion_is_completed_by_the_next(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, http):
        await create(http, name="shop")
        await http.put("/admin/arms/a?namespace=shop", json={"features": [1.0]})
        record = await record_of(redis)
    await redis.set(
        record.keys.record, replace(record, state="deleted", revision=record.revision + 1, layout=None).encode()
    )
    async with running_app(valkey_url) as (_, http):
        assert (await http.post("/recommend?namespace=shop", json=ASK)).status_code == 404
        assert (await http.delete("/admin/namespaces/shop")).status_code == 200
        assert await left_of(redis) == [record.keys.record.encode()]
        assert not await redis.sismember(NAMESPACE_NAMES, "shop")
        assert (await http.delete("/admin/namespaces/shop")).status_code == 404


@pytest.mark.parametrize("markers_gone", [False, True])
async def test_namespace_recreated_after_an_interrupted_deletion_is_empty(
    http: httpx.AsyncClient, redis: Redis, markers_gone: bool
) -> None:
    await create(http, name="shop")
    await http.put("/admin/arms/a?namespace=shop", json={"features": [1.0]})
    await http.patch("/admin/config?namespace=shop", json={"epsilon": 0.5})
    record = await record_of(redis)
    await redis.set(
        record.keys.record, replace(record, state="deleted", revision=record.revision + 1, layout=None).encode()
    )
    if markers_gone:
        for partition in range(record.partitions):
            await redis.delete(record.keys.marker(partition))
    await create(http, name="shop")
    assert (await http.get("/admin/arms?namespace=shop")).json()["count"] == 0
    assert (await http.get("/admin/audit?namespace=shop")).json()["lines"] == []
    assert (await http.post("/recommend?namespace=shop", json=ASK)).status_code == 200


async def test_interrupted_creation_is_completed_by_the_same_call(http: httpx.AsyncClient, redis: Redis) -> None:
    await create(http, name="shop", partitions=3)
    record = await record_of(redis)
    await http.delete("/admin/namespaces/shop")
    half = replace(record, state="creating", revision=record.revision + 9)
    await redis.set(record.keys.record, half.encode())
    other = await http.post("/admin/namespaces", json={"name": "shop", "partitions": 3, "hash_dimension": 7})
    assert (other.status_code, other.json()["type"]) == (409, "/problems/namespace-exists")
    await create(http, name="shop", partitions=3)
    assert await redis.sismember(NAMESPACE_NAMES, "shop")
    assert (await http.post("/recommend?namespace=shop", json=ASK)).status_code == 200
    again = await http.post("/admin/namespaces", json={"name": "shop", "partitions": 3})
    assert again.status_code == 409


async def test_one_of_two_different_creations_is_refused(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (_, there):
        for turn in range(5):
            first, second = await asyncio.gather(
                here.post("/admin/namespaces", json={"name": f"shop{turn}", "partitions": 2, "hash_dimension": 8}),
                there.post("/admin/namespaces", json={"name": f"shop{turn}", "partitions": 3}),
            )
            assert sorted((first.status_code, second.status_code)) == [201, 409], (first.text, second.text)
            made = first if first.status_code == 201 else second
            assert (await here.get(f"/admin/namespaces/shop{turn}")).json()["partitions"] == made.json()["partitions"]


async def test_no_writes_to_a_namespace_deleted_elsewhere(redis: Redis, valkey_url: str) -> None:
    """Also before the process has noticed the deletion."""
    async with running_app(valkey_url) as (app, here), running_app(valkey_url) as (_, there):
        await create(there, name="shop")
        assert (await here.post("/recommend?namespace=shop", json=ASK)).status_code == 200
        engine = app.state.metaban.recommenders.engines["shop"]
        await engine._guard.stop()  # it does not notice the deletion
        await there.delete("/admin/namespaces/shop")
        put = await here.put("/admin/arms/a?namespace=shop", json={"features": [1.0, 1.0, 1.0]})
        assert put.status_code in {404, 503}, put.text
        changed = await here.patch("/admin/config?namespace=shop", json={"epsilon": 0.5})
        assert changed.status_code in {404, 503}, changed.text
        told = await here.post("/recommend?namespace=shop", json={**ASK, "user_id": "v", "user_features": [1.0]})
        assert (told.status_code, told.json().get("logged", False)) in {(200, False), (404, False), (503, False)}
        forgotten = await here.delete("/admin/users/u?namespace=shop")
        assert forgotten.status_code in {404, 503}
        assert await left_of(redis) == [(await record_of(redis)).keys.record.encode()]
        await create(there, name="shop")
        changed = await here.patch("/admin/config?namespace=shop", json={"epsilon": 0.5})
        assert changed.status_code in {404, 503}, changed.text
        put = await here.put("/admin/arms/a?namespace=shop", json={"features": [1.0, 1.0, 1.0]})
        assert put.status_code in {404, 503}, put.text
        told = await here.post("/recommend?namespace=shop", json={**ASK, "user_id": "v", "user_features": [1.0]})
        assert (told.status_code, told.json().get("logged", False)) in {(200, False), (404, False), (503, False)}
        assert (await there.get("/admin/users/v?namespace=shop")).status_code == 404
        assert (await there.get("/admin/config?namespace=shop")).json()["settings"]["epsilon"] == 0.02


async def test_old_engine_does_not_fix_the_layout_of_a_recreated_namespace(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (app, here), running_app(valkey_url) as (_, there):
        await create(there, name="shop")
        assert (await here.get("/admin/config?namespace=shop")).status_code == 200  # open, but without a layout
        await app.state.metaban.recommenders.engines["shop"]._guard.stop()
        await there.delete("/admin/namespaces/shop")
        assert (await here.post("/recommend?namespace=shop", json=ASK)).status_code in {404, 503}
        assert (await record_of(redis)).layout is None
        await create(there, name="shop")
        assert (await here.post("/recommend?namespace=shop", json=ASK)).status_code in {404, 503}
        assert (await record_of(redis)).layout is None


async def test_request_does_not_recreate_a_namespace_being_deleted(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, here):
        await create(here, name="shop")
    async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (_, there):
        for _ in range(5):
            answers = await asyncio.gather(
                there.delete("/admin/namespaces/shop"), *(here.get("/admin/config?namespace=shop") for _ in range(20))
            )
            assert {answer.status_code for answer in answers} <= {200, 404, 503}
            assert (await record_of(redis)).state == "deleted"
            await create(there, name="shop")


async def test_damaged_namespace_is_reported_and_can_be_deleted(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, http):
        for name in ("bad", "lost", "shop"):
            await create(http, name=name)
        bad, lost = await record_of(redis, "bad"), await record_of(redis, "lost")
    await redis.set(bad.keys.record, replace(bad, learner={"preset": "other"}, revision=bad.revision + 1).encode())
    await redis.delete(lost.keys.marker(1))
    async with running_app(valkey_url) as (_, http):
        for name in ("bad", "lost"):
            answer = await http.post(f"/recommend?namespace={name}", json=ASK)
            assert answer.status_code == 503, answer.text
        assert (await http.post("/recommend?namespace=shop", json=ASK)).status_code == 200
        assert (await http.post("/recommend", json=ASK)).status_code == 200
        assert (await http.get("/health/ready")).status_code == 200
        listed = await http.get("/admin/namespaces")
        assert [each["name"] for each in listed.json()["namespaces"]] == ["bad", "default", "lost", "shop"]
        for name in ("bad", "lost"):
            assert (await http.delete(f"/admin/namespaces/{name}")).status_code == 200
            assert (await http.post(f"/recommend?namespace={name}", json=ASK)).status_code == 404
            await create(http, name=name)
            assert (await http.post(f"/recommend?namespace={name}", json=ASK)).status_code == 200


async def test_unhealthy_namespace_does_not_affect_readiness(http: httpx.AsyncClient, redis: Redis) -> None:
    await create(http, name="shop")
    keys = (await record_of(redis)).keys
    await redis.set(keys.restoring, "damage")
    await redis.set(keys.counters(0), "damage")
    ready = await http.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    assert ready.json()["checks"]["restore of shop"]["ok"] is False
    await http.post("/recommend", json=ASK)
    shown = await http.get("/metrics")
    assert "metaban_ready 1.0" in shown.text
    assert 'metaban_backlog_events{namespace="default"} 0.0' in shown.text


async def test_namespace_keeps_its_settings_when_the_deployment_changes(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url, **PAPER) as (_, http), worker_running(valkey_url):
        await create(http, name="shop")
        await http.post("/recommend?namespace=shop", json={**ASK, "decision_id": "d"})
        told = await http.post("/feedback?namespace=shop&wait=applied", json={"decision_id": "d", "reward": 1})
        assert told.json()["applied"] is True
    await redis.delete(*[key async for key in redis.scan_iter("metaban:{default:*")])
    other = {"preset": "default", "width": 8, "partitions": 5, "seed": 3, "hash_dimension": 9}
    async with running_app(valkey_url, **other) as (_, http), worker_running(valkey_url):
        shown = await http.get("/admin/namespaces/shop")
        assert shown.status_code == 200, shown.text
        assert (shown.json()["preset"], shown.json()["partitions"]) == ("paper", 2)
        answer = await http.post("/recommend?namespace=shop", json={**ASK, "decision_id": "e"})
        assert (answer.status_code, answer.json()["user_version"]) == (200, 1)
        told = await http.post("/feedback?namespace=shop&wait=applied", json={"decision_id": "e", "reward": 1})
        assert told.json()["applied"] is True
        changed = await http.patch("/admin/config?namespace=shop", json={"alpha": 0.5, "epsilon": 0.1})
        assert changed.json()["overridden"] == ["alpha", "epsilon"]


async def test_metrics_of_a_deleted_namespace_are_removed(http: httpx.AsyncClient) -> None:
    await create(http, name="shop")
    await http.post("/recommend?namespace=shop", json=ASK)
    assert 'namespace="shop"' in (await http.get("/metrics")).text
    await http.delete("/admin/namespaces/shop")
    assert 'namespace="shop"' not in (await http.get("/metrics")).text


async def test_default_namespace_recreated_elsewhere_is_opened_without_a_request(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (_, there):
        assert (await here.post("/recommend", json=ASK)).status_code == 200
        assert (await there.delete("/admin/namespaces/default")).status_code == 200
        epoch = (await record_of(redis, "default")).store_id

        async def anew() -> bool:
            config = (await here.get("/health/ready")).json()
            return config["status"] == "ready" and (await record_of(redis, "default")).store_id == epoch

        await soon(anew)
        other = {"user_id": "u", "arms": [{"id": "a", "features": [1.0]}]}
        assert (await there.post("/recommend", json=other)).status_code == 200

        async def followed() -> bool:
            return (await here.post("/recommend", json=other)).status_code == 200

        await soon(followed)


async def test_namespace_that_cannot_be_opened_is_refused_at_once(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metaban.service.engine.registry.RETRY_S", 60)
    async with running_app(valkey_url) as (_, http):
        await create(http, name="shop")
        record = await record_of(redis)
    await redis.delete(record.keys.marker(0))
    async with running_app(valkey_url) as (_, http):
        with structlog.testing.capture_logs() as lines:
            answers = await asyncio.gather(*(http.post("/recommend?namespace=shop", json=ASK) for _ in range(50)))
        assert {answer.status_code for answer in answers} == {503}
        assert 'namespace="shop"' not in (await http.get("/metrics")).text
        assert [line for line in lines if line["event"] == "namespace_open_failed"] == []  # logged at the start
        await http.delete("/admin/namespaces/shop")
        await create(http, name="shop")
        assert (await http.post("/recommend?namespace=shop", json=ASK)).status_code == 200


async def test_deletion_elsewhere_is_noticed(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (_, there):
        await create(there, name="shop")
        assert (await here.post("/recommend?namespace=shop", json=ASK)).status_code == 200
        await there.delete("/admin/namespaces/shop")

        async def gone() -> bool:
            return 'namespace="shop"' not in (await here.get("/metrics")).text

        await soon(gone)  # without a request
        assert (await here.get("/health/ready")).json()["status"] == "ready"


async def test_wait_for_a_reward_before_any_recommendation_here(redis: Redis, valkey_url: str) -> None:
    async with (
        running_app(valkey_url) as (_, here),
        running_app(valkey_url) as (app, there),
        worker_running(valkey_url),
    ):
        await app.state.metaban.recommenders.default._guard.stop()  # it does not know the layout yet
        await here.post("/recommend", json={**ASK, "decision_id": "d"})
        told = await there.post("/feedback?wait=applied", json={"decision_id": "d", "reward": 1})
        assert told.json()["applied"] is True
