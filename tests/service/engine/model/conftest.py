"""Replicas of the namespace `shop`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.service.engine.model.replicas import Watched
from tests.worker.workshop import Workshop


@pytest.fixture
async def watch(shop: Workshop) -> AsyncIterator[Callable[..., Watched]]:
    """Makes replicas and stops them after the test."""
    made: list[Watched] = []

    def make(**options: Any) -> Watched:
        made.append(Watched(shop, **options))
        return made[-1]

    yield make
    for watched in made:
        async with asyncio.timeout(30):
            await watched.replica.stop()


@pytest.fixture
def fast_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses and reads of replicas."""
    monkeypatch.setattr("metaban.service.engine.model.replica.UNAVAILABLE_PAUSE_S", 0.02)
    monkeypatch.setattr("metaban.service.engine.model.replica.TAIL_BLOCK_MS", 100)
