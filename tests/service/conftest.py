"""A namespace on a real Valkey and the thread that owns the tensors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
from redis.asyncio import Redis

from store.connection import connect


@pytest.fixture
def compute() -> Iterator[Executor]:
    """One thread for tensors, as in the service."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


@pytest.fixture
async def client(redis: Redis, valkey_url: str) -> AsyncIterator[Redis]:
    """A client as the service makes it, of an empty store."""
    client = connect(valkey_url)
    yield client
    await client.aclose()
