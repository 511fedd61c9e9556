"""Every fault for a few seconds: `make chaos` does the same for longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.catalogue import FAULTS, Fault
from tests.chaos.nursery import Nursery

SEED = 1


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(fault: Fault, nursery: Nursery) -> None:
    row = fault.run(nursery, seconds=fault.short_s, seed=SEED)
    assert row.holds, "\n".join([*row.problems[:20], *(f"see {folder}" for folder in row.kept)])
    assert row.applied > 0, "nothing was learned, so nothing was tested"
