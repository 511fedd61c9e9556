"""`min_version`: answers from an epoch or a later one, or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from edge_engine import EdgeEngine, edge
from redis.asyncio import Redis

from service.contracts import RecommendCommand
from tests.service.test_edge_snapshots import ARMS, served, teach
from tests.service.test_engine import worker_running

ASK: dict[str, Any] = {"user_id": "ann", "arms": ARMS}


async def test_waits_for_an_epoch(
    redis: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch of the published learner is due at sixteen events."""
    monkeypatch.setattr("service.replica.TAIL_BLOCK_MS", 100)
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


async def test_is_told_when_it_takes_too_long(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path, wait_applied_timeout_s=0.05) as client:
        for version in (1, 2**63 - 1):
            late = await client.post("/recommend", json={**ASK, "decision_id": "d", "min_version": version})
            assert (late.status_code, late.json()["type"]) == (503, "/problems/version-not-reached")
            assert late.headers["Retry-After"] == "1"
            assert late.json()["errors"][0]["field"] == "min_version"
        # Nothing was decided, and what is asked for next is.
        made = await client.post("/recommend", json={**ASK, "decision_id": "d"})
        assert made.status_code == 200
        # A decision that was made is made, whatever is asked for now: its model_version tells.
        again = await client.post("/recommend", json={**ASK, "decision_id": "d", "min_version": 7, "explain": True})
        assert again.status_code == 200
        assert again.json()["model_version"] == 0
        batch = {"requests": [{**ASK, "min_version": 1}, ASK]}
        results = (await client.post("/recommend/batch", json=batch)).json()["results"]
        assert [each["status"] for each in results] == [503, 200]


@pytest.mark.parametrize("version", ["-1", str(2**63), "1e400", "1.5", '"1"', "true", "[1]", "1" + "0" * 400])
async def test_refused(version: str) -> None:
    engine = EdgeEngine()
    body = f'{{"user_id": "u", "arms": [{{"id": "a", "features": [1]}}], "min_version": {version}}}'
    async with edge(engine) as client:
        answer = await client.post("/recommend", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422
        assert [error["field"] for error in answer.json()["errors"]] == ["min_version"]
        assert engine.calls == []


async def test_neither_is_part_of_what_is_asked() -> None:
    engine = EdgeEngine()
    async with edge(engine) as client:
        for more in ({}, {"explain": False}, {"min_version": 3}, {"min_version": None}):
            assert (await client.post("/recommend", json={**ASK, **more})).status_code == 200
        commands = [call for call in engine.calls if isinstance(call, RecommendCommand)]
        assert len({command.fingerprint for command in commands}) == 1
        assert [command.min_version for command in commands] == [None, None, 3, None]
        for wrong in (1, "true", None):
            assert (await client.post("/recommend", json={**ASK, "explain": wrong})).status_code == 422
