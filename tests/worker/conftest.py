"""Fixtures for a worker's parts on a real Valkey."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.worker.workshop import OpenWorkshop, Workshop


@pytest.fixture(autouse=True)
def plain_logs() -> Iterator[None]:
    """Log tracebacks without local variables, as the worker does: structlog's default is slower than the tests."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, renderer]
    )
    yield
    structlog.reset_defaults()


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    """A namespace with one partition and small learners."""
    return await open_workshop()
