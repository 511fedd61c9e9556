"""The whole app in this process, on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from metaban.service.engine.registry import EngineRegistry
from metaban.service.http.app import create_app
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics

#: Settings with a small version of the shipped learner.
SMALL: dict[str, Any] = {
    "namespace": "default",
    "partitions": 2,
    "preset": "default",
    "width": 6,
    "samples_kept": 20,
    "wait_applied_timeout_s": 60.0,
    "device": "cpu",
}
#: The learner of the paper, for tests of its parts.
PAPER: dict[str, Any] = {"preset": "paper", "width": 6, "user_steps": 2}
ARMS = [{"id": f"arm {n}", "features": [float(n), 1.0, -float(n)]} for n in range(4)]


@asynccontextmanager
async def running_app(url: str, **changes: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """An app with small learners, and a client of it."""
    chosen = Settings(**{**SMALL, **changes})
    metrics = Metrics()
    app = create_app(chosen, EngineRegistry(chosen, url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        yield app, client


#: Arms of `teach`.
SHOP_ARMS = [{"id": f"a{n}", "features": [n, 1 - n, 0.5]} for n in range(3)]


@asynccontextmanager
async def served(url: str, data_dir: Path, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that serves the namespace `shop`."""
    async with running_app(url, **{"namespace": "shop", "data_dir": data_dir, **changes}) as (_, client):
        yield client


async def teach(client: httpx.AsyncClient, user: str, rewards: list[float]) -> None:
    """Apply rewards of a user, one decision each."""
    for reward in rewards:
        asked = (await client.post("/recommend", json={"user_id": user, "arms": SHOP_ARMS})).json()
        told = await client.post("/feedback?wait=applied", json={"decision_id": asked["decision_id"], "reward": reward})
        assert told.json()["applied"], told.text


async def finished(client: httpx.AsyncClient, started: httpx.Response) -> dict[str, Any]:
    """Wait for a job to end, and return it."""
    assert started.status_code == 202, started.text
    job: dict[str, Any] = started.json()
    async with asyncio.timeout(30):
        while job["state"] == "running":
            await asyncio.sleep(0.02)
            job = (await client.get(f"/admin/jobs/{job['id']}")).json()
    return job
