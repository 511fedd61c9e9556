"""Service and worker refuse to start on a store that forgets: one server, or any one of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.valkeys import Valkey, running, running_cluster

EVICTING = ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")


@pytest.fixture(scope="module", params=["one server", "the last of a cluster"])
def evicting_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("evicting")
    if request.param == "one server":
        alone = Valkey(folder)
        with running(alone):
            alone.ask(*EVICTING)
            yield alone.url
    else:
        with running_cluster(folder) as cluster:
            cluster.nodes[-1].ask(*EVICTING)
            yield cluster.url


@pytest.mark.parametrize("command", [["serve", "--no-worker", "--port", "0"], ["worker"]], ids=["serve", "worker"])
def test_refused_at_the_start(evicting_url: str, command: list[str], tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("METABAN_")}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "service.cli", *command],
        env={**kept, "REDIS_URL": evicting_url, "METABAN_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "maxmemory-policy noeviction" in ended.stderr
