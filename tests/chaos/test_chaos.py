"""Runs the faults that differ most for a few seconds; `make chaos` runs all of them, and longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.catalogue import BY_NAME
from tests.chaos.fork_server import ForkServer

SEED = 1
NAMES = (
    "everything", "store-kill-everysec", "meta-kill", "lost-replies", "poison", "file-cut", "server-stop", "forget",
    "restore",
)  # fmt: skip


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_fault(name: str, fork_server: ForkServer) -> None:
    fault = BY_NAME[name]
    row = fault.run(fork_server, seconds=fault.short_s, seed=SEED)
    assert row.holds, "\n".join([*row.problems[:20], *(f"see {folder}" for folder in row.kept)])
    assert row.applied > 0, "nothing was learned, so nothing was tested"
