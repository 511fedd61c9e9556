"""Fixtures for a worker's parts on a real Valkey."""

from __future__ import annotations

import pytest

from tests.worker.workshop import OpenWorkshop, Workshop


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    """A namespace with one partition and small learners."""
    return await open_workshop()
