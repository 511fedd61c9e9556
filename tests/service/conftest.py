"""The whole app in this process, for tests of what it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from redis.asyncio import Redis

from tests.service.apps import running_app


@pytest.fixture
def short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that stop soon."""
    monkeypatch.setattr("service.replica.TAIL_BLOCK_MS", 100)


@pytest.fixture
async def http(redis: Redis, valkey_url: str, short_tails: None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with small learners, on an empty store."""
    async with running_app(valkey_url) as (_, client):
        yield client
