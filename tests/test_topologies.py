"""The most important tests against a Valkey cluster; `make test-cluster` runs all of them there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ESSENTIAL = [
    "tests/store/client/test_connection.py",
    "tests/store/decisions/test_decisions.py",
    "tests/store/shared/test_epochs.py",
    "tests/store/events/test_stream.py",
    "tests/store/scripts/test_slots.py",
    "tests/store/users/test_users.py",
    "tests/worker/learning/test_consumer.py::TestOutages",
    "tests/worker/test_runtime.py",
    "tests/service/engine/test_engine.py",
]


@pytest.mark.slow
@pytest.mark.single_node("it starts tests on a cluster itself")
def test_the_essential_tests_pass_on_a_cluster() -> None:
    # With the variables of this run's xdist workers, the other run would believe to be one of them.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *ESSENTIAL]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, "METABAN_TEST_TOPOLOGY": "cluster"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4_000:] + ended.stderr[-1_000:]
    assert " passed" in ended.stdout
