"""Service and worker refuse to start on a store that evicts keys, or a cluster with such a server."""

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


@pytest.mark.slow
def test_an_evicting_store_is_refused_at_start(evicting_url: str, tmp_path: Path) -> None:
    command = ["worker"] if "cluster" in evicting_url else ["serve", "--no-worker", "--port", "0"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("METABAN_")}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "metaban.service.cli.main", *command],
        env={**kept, "REDIS_URL": evicting_url, "METABAN_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1
    assert "maxmemory-policy noeviction" in ended.stderr
