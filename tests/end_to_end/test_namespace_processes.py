"""Namespaces created and deleted under load: two services and a worker on one store."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from metaban.service.process.local_deployment import Deployment
from tests.worker.workshop import soon

ARMS = [{"id": f"a{n}", "features": [n / 4, 1.0]} for n in range(4)]
TURNS = 5
EXPECTED_STATUSES = {200, 201, 202, 404, 409, 503}


@pytest.mark.slow
async def test_namespaces_deleted_and_created_again_under_load(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    environment = {"REDIS_URL": valkey_url, "METABAN_PARTITIONS": "4"}
    with (
        Deployment(tmp_path / "one", environment) as one,
        Deployment(tmp_path / "two", environment, "--no-worker") as two,
    ):
        limits = httpx.Limits(max_connections=32)
        async with (
            httpx.AsyncClient(base_url=one.url, timeout=60, limits=limits) as here,
            httpx.AsyncClient(base_url=two.url, timeout=60, limits=limits) as there,
        ):
            answers: Counter[tuple[str, int]] = Counter()
            ended = asyncio.Event()

            async def use(http: httpx.AsyncClient, place: int) -> None:
                turn = 0
                while not ended.is_set():
                    turn += 1
                    ask = {"user_id": f"u{place}", "arms": ARMS, "user_features": [place], "explain": turn % 5 == 0}
                    told = await http.post("/recommend?namespace=shop", json=ask)
                    answers["recommend", told.status_code] += 1
                    if told.status_code == 200:
                        reward = {"decision_id": told.json()["decision_id"], "reward": 1}
                        for wait in ("", "&wait=applied")[: 1 + (turn % 7 == 0)]:
                            told = await http.post(f"/feedback?namespace=shop{wait}", json=reward)
                            answers["feedback", told.status_code] += 1
                    if turn % 4 == 0:
                        told = await http.put(f"/admin/arms/{place}?namespace=shop", json={"features": [1.0, 2.0]})
                        answers["arms", told.status_code] += 1
                        told = await http.patch("/admin/config?namespace=shop", json={"epsilon": place / 100})
                        answers["config", told.status_code] += 1
                    if told.status_code in {404, 503}:
                        await asyncio.sleep(0.01)

            using = [asyncio.create_task(use(http, place)) for place in range(4) for http in (here, there)]
            for turn in range(TURNS):
                maker, breaker = (here, there) if turn % 2 else (there, here)
                made = await maker.post("/admin/namespaces", json={"name": "shop"})
                assert made.status_code == 201, made.text
                await asyncio.sleep(1)
                gone = await breaker.delete("/admin/namespaces/shop")
                assert gone.status_code == 200, gone.text
            ended.set()
            async with asyncio.timeout(60):
                await asyncio.gather(*using)
            unexpected = {call: count for call, count in answers.items() if call[1] not in EXPECTED_STATUSES}
            assert not unexpected, (answers, _errors(one), _errors(two))
            assert answers["recommend", 200] > 5
            assert answers["feedback", 202] > 5

            async def leases_are_over() -> bool:
                return not [key async for key in redis.scan_iter("metaban:{shop:*") if key.endswith(b":owner")]

            await soon(leases_are_over)
            # Decisions of requests in progress expire by themselves.
            left = [key async for key in redis.scan_iter("metaban:{shop:*") if b":decision:" not in key]
            assert left == [b"metaban:{shop:meta}:namespace"]
            await there.post("/admin/namespaces", json={"name": "shop", "partitions": 2})
            ask = {"user_id": "new", "arms": ARMS, "decision_id": "last"}
            told = await here.post("/recommend?namespace=shop", json=ask)
            assert (told.status_code, told.json()["model_version"]) == (200, 0), told.text
            told = await there.post("/feedback?namespace=shop&wait=applied", json={"decision_id": "last", "reward": 1})
            assert told.json()["applied"] is True, told.text
            assert (await here.get("/admin/arms?namespace=shop")).json()["count"] == 0
        assert "child_ended" not in one.log()
        assert not _errors(one), _errors(one)
        assert not _errors(two), _errors(two)


def _errors(deployment: Deployment) -> list[str]:
    """Log lines of unexpected errors."""
    words = ("unexpected_error", "Traceback", "never retrieved", "not worked on")
    return [line[:2_000] for line in deployment.log().splitlines() if any(word in line for word in words)]
