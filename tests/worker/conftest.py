"""A worker's parts on a real Valkey."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import pytest
import structlog
from redis.asyncio import Redis

from tests.worker.workshop import Workshop

OpenWorkshop = Callable[..., Awaitable[Workshop]]


@pytest.fixture(autouse=True)
def plain_logs() -> Iterator[None]:
    """As the worker logs: structlog's own default draws every local variable, which takes longer than the work."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer])
    yield
    structlog.reset_defaults()


@pytest.fixture
def open_workshop(client: Redis, compute: Executor) -> OpenWorkshop:
    """Makes the namespace, with the settings a test needs."""

    async def make(**changes: Any) -> Workshop:
        return await Workshop.open(client, compute, **changes)

    return make


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    """One partition, small learners."""
    return await open_workshop()
