"""The essential part of the suite once more, against a cluster; `make test-cluster` runs all of it there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ESSENTIAL = [
    "tests/store/test_store_connection.py",
    "tests/store/test_store_decisions.py",
    "tests/store/test_store_epochs.py",
    "tests/store/test_store_events.py",
    "tests/store/test_store_fusion.py",
    "tests/store/test_store_namespaces.py",
    "tests/store/test_store_slots.py",
    "tests/store/test_store_starts.py",
    "tests/store/test_store_users.py",
    "tests/worker/test_consumer.py::TestOutages",
    "tests/worker/test_runtime.py",
    "tests/service/test_engine.py",
]


@pytest.mark.single_node("it is what starts the tests on a cluster")
def test_the_same_holds_on_a_cluster() -> None:
    # Names of the workers of this run would make the other believe that it is one of them.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *ESSENTIAL]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, "METABAN_TEST_TOPOLOGY": "cluster"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4_000:] + ended.stderr[-1_000:]
    assert " passed" in ended.stdout
