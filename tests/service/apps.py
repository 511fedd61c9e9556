"""The whole app in this process, on a real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from service.app import create_app
from service.metrics import Metrics
from service.recommenders import Recommenders
from service.settings import Settings

SMALL: dict[str, Any] = {
    "namespace": "default",
    "partitions": 2,
    "preset": "paper",
    "width": 6,
    "user_steps": 2,
    "samples_kept": 20,
    "wait_applied_timeout_s": 5.0,
    "device": "cpu",
}
ARMS = [{"id": f"arm {n}", "features": [float(n), 1.0, -float(n)]} for n in range(4)]


@asynccontextmanager
async def running_app(url: str, **changes: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """An app with small learners, and a client of it."""
    chosen = Settings(**{**SMALL, **changes})
    metrics = Metrics()
    app = create_app(chosen, Recommenders(chosen, url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        yield app, client
