"""The real app around a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.service.scripted_engine import ScriptedEngine, scripted_app


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def api(scripted: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app around `scripted`."""
    async with scripted_app(scripted) as client:
        yield client
