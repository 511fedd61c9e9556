"""`min_version`: the answer is from this epoch or a later one, or an error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from metaban.service.engine.commands import RecommendCommand
from tests.service.apps import SHOP_ARMS as ARMS
from tests.service.apps import served, teach
from tests.service.engines import worker_running
from tests.service.scripted_engine import ScriptedEngine, scripted_app

ASK: dict[str, Any] = {"user_id": "ann", "arms": ARMS}


async def test_waits_for_an_epoch(
    redis: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waits for an epoch that sixteen events make due."""
    monkeypatch.setattr("metaban.service.engine.model.replica.TAIL_BLOCK_MS", 100)
    async with served(valkey_url, tmp_path, wait_applied_timeout_s=30) as client, worker_running(valkey_url):
        first = (await client.post("/recommend", json={**ASK, "min_version": 0})).json()
        assert (first["model_version"], first["user_version"]) == (0, 0)
        waiting = asyncio.create_task(client.post("/recommend", json={**ASK, "min_version": 1}))
        await teach(client, "ann", [1, 0] * 8)
        answer = (await waiting).json()
        assert answer["model_version"] >= 1
        again = (await client.post("/recommend", json={**ASK, "min_version": answer["model_version"]})).json()
        assert again["model_version"] >= answer["model_version"]
        assert again["user_version"] == 16


async def test_timeout_is_an_error(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path, wait_applied_timeout_s=0.05) as client:
        for version in (1, 2**63 - 1):
            late = await client.post("/recommend", json={**ASK, "decision_id": "d", "min_version": version})
            assert (late.status_code, late.json()["type"]) == (503, "/problems/version-not-reached")
            assert late.headers["Retry-After"] == "1"
            assert late.json()["errors"][0]["field"] == "min_version"
        # Nothing was decided, and the next request is.
        made = await client.post("/recommend", json={**ASK, "decision_id": "d"})
        assert made.status_code == 200
        # A repeated decision is returned whatever min_version is; its model_version shows the epoch.
        again = await client.post("/recommend", json={**ASK, "decision_id": "d", "min_version": 7, "explain": True})
        assert again.status_code == 200
        assert again.json()["model_version"] == 0
        batch = {"requests": [{**ASK, "min_version": 1}, ASK]}
        results = (await client.post("/recommend/batch", json=batch)).json()["results"]
        assert [each["status"] for each in results] == [503, 200]


@pytest.mark.parametrize("version", ["-1", str(2**63), "1e400", "1.5", '"1"', "true", "[1]", "1" + "0" * 400])
async def test_invalid_min_version_is_refused(version: str) -> None:
    engine = ScriptedEngine()
    body = f'{{"user_id": "u", "arms": [{{"id": "a", "features": [1]}}], "min_version": {version}}}'
    async with scripted_app(engine) as client:
        answer = await client.post("/recommend", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422
        assert [error["field"] for error in answer.json()["errors"]] == ["min_version"]
        assert engine.calls == []


async def test_min_version_and_explain_are_not_part_of_the_fingerprint() -> None:
    engine = ScriptedEngine()
    async with scripted_app(engine) as client:
        for more in ({}, {"explain": False}, {"min_version": 3}, {"min_version": None}):
            assert (await client.post("/recommend", json={**ASK, **more})).status_code == 200
        commands = [call for call in engine.calls if isinstance(call, RecommendCommand)]
        assert len({command.fingerprint for command in commands}) == 1
        assert [command.min_version for command in commands] == [None, None, 3, None]
        for wrong in (1, "true", None):
            assert (await client.post("/recommend", json={**ASK, "explain": wrong})).status_code == 422
