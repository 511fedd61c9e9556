"""Apps, engines and namespaces on the test store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from metaban.service.engine.engine import Connections, Engine
from metaban.service.telemetry.metrics import Metrics
from tests.service.apps import running_app
from tests.service.engines import MakeEngine, settings
from tests.worker.workshop import Workshop


@pytest.fixture
def short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short blocking reads of replicas, so that they stop quickly."""
    monkeypatch.setattr("metaban.service.engine.model.replica.TAIL_BLOCK_MS", 100)


@pytest.fixture
async def http(redis: Redis, valkey_url: str, short_tails: None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with small learners, on an empty store."""
    async with running_app(valkey_url) as (_, client):
        yield client


@pytest.fixture
async def make_engine(redis: Redis, valkey_url: str, short_tails: None) -> AsyncIterator[MakeEngine]:
    """Makes engines and stops them after the test."""
    made: list[Engine] = []
    connected: list[Connections] = []

    def make(**changes: Any) -> Engine:
        connected.append(Connections(valkey_url))
        made.append(Engine.from_settings(settings(**changes), connected[-1], Metrics()))
        return made[-1]

    yield make
    for engine, connections in zip(made, connected, strict=True):
        async with asyncio.timeout(30):
            await engine.stop()
            await connections.aclose()


@pytest.fixture
async def engine(make_engine: MakeEngine) -> Engine:
    """A started engine."""
    engine = make_engine()
    await engine.start()
    return engine


@pytest.fixture
async def shop(client: Redis, compute: Executor) -> Workshop:
    """A namespace of two partitions."""
    return await Workshop.open(client, compute, partitions=2)
